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
    nodes = one["mapping"]
    messages: list[dict[str, Any]] = []
    told = {}  # by node: the number of the message that it became, or stands behind; 0 at first
    waiting = [(at, 0) for at, node in reversed(nodes.items()) if node.get("parent") not in nodes]
    while waiting:
        at, parent = waiting.pop()
        if at in told:
            continue
        role, text, model = _said(nodes[at].get("message") or {})
        if text and parent and messages[-1]["id"] == parent and messages[-1]["role"] == role:
            messages[-1]["content"].append(text)  # a tool was called amid one answer
        elif text:
            made = {"id": len(messages) + 1, "parent": parent, "role": role}
            messages.append({**made, "content": [text], "model": model})
            parent = len(messages)
        told[at] = parent
        waiting += [(child, parent) for child in reversed(nodes[at].get("children") or [])]
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
    role, content = message.get("author", {}).get("role"), message.get("content") or {}
    if role not in ("user", "assistant") or content.get("content_type") not in KINDS:
        return "", "", ""
    if message.get("recipient", "all") != "all":
        return "", "", ""
    text = "\n\n".join(part for part in content["parts"] if isinstance(part, str)).strip()
    return role, text, str((message.get("metadata") or {}).get("model_slug") or "")
