"""ChatGPT's export (conversations.json) in the form of our own file; it is checked like that."""

from collections.abc import Mapping
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.ui.page.inputs import MAX_TITLE

KINDS = ("text", "multimodal_text")  # of content; others are calls of tools and thoughts


def is_chatgpt(values: object) -> bool:
    """Whether a file is a list of conversations, each a mapping of nodes."""
    first = values[0] if isinstance(values, list) and values else None
    return isinstance(first, dict) and "mapping" in first


def translated(values: list[Any]) -> list[dict[str, Any]]:
    """The conversations in which something was said. Raises UsageError."""
    try:
        found = [_conversation(one) for one in values]
    except (KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"it is no export of ChatGPT that can be read ({error!r:.80})") from None
    return [one for one in found if one["messages"]]


def _conversation(one: Mapping[str, Any]) -> dict[str, Any]:
    nodes = {at: node for at, node in one["mapping"].items() if node}
    messages: list[dict[str, Any]] = []
    told = {}  # by node: the number of the message that it became, or stands behind; 0 at first
    first = [at for at, node in nodes.items() if node.get("parent") not in nodes]
    waiting = [(at, 0, False) for at in reversed(first)]
    while waiting:
        at, parent, is_only = waiting.pop()  # is_only: nothing else follows the last message
        if at in told:
            continue
        role, text, model = _said(nodes[at].get("message") or {})
        if text and is_only and messages[-1]["role"] == role:
            messages[-1]["content"].append(text)  # a tool was called amid one answer
        elif text:
            made = {"id": len(messages) + 1, "parent": parent, "role": role}
            messages.append({**made, "content": [text], "model": model})
            parent = len(messages)
        told[at] = parent
        children = [child for child in nodes[at].get("children") or [] if child in nodes]
        is_only = (is_only or bool(text)) and len(children) == 1
        waiting += [(child, parent, is_only) for child in reversed(children)]
    for message in messages:
        message["content"] = "\n\n".join(message["content"])
    return {
        "id": one.get("conversation_id") or one.get("id") or "",
        "title": (one.get("title") or "")[:MAX_TITLE],
        "created_at": one.get("create_time"),
        "updated_at": one.get("update_time"),
        "messages": messages,
        "shown": told.get(one.get("current_node")) or len(messages),
    }


def _said(message: Mapping[str, Any]) -> tuple[str, str, str]:
    """(role, text, model) of what was said to be read; no text where it is none of that."""
    role = (message.get("author") or {}).get("role")
    content = message.get("content") or {}
    if role not in ("user", "assistant") or content.get("content_type") not in KINDS:
        return "", "", ""
    if (message.get("recipient") or "all") != "all":
        return "", "", ""
    parts = (  # what was spoken stands in an object
        part.get("text") if isinstance(part, dict) else part for part in content.get("parts") or []
    )
    text = "\n\n".join(part for part in parts if isinstance(part, str)).strip()
    return role, text, str((message.get("metadata") or {}).get("model_slug") or "")
