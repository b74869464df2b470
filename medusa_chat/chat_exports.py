"""ExportedConversation: a conversation in an export of ChatGPT or Open WebUI, as text."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

TEXT_KINDS = ("text", "multimodal_text")  # content types; others: code, thoughts
ROLES = ("user", "assistant")
# What Open WebUI folds in an answer: reasoning, tool calls and their results.
FOLD = re.compile(r"^<details type=", re.MULTILINE)
UNFOLD = re.compile(r"^</details>\s*", re.MULTILINE)


class ExportedMessage(NamedTuple):
    """A message. id: from 1, in order. parent: the id of the previous message, 0 for the first.
    model: the model of an answer, or empty."""

    id: int
    parent: int
    role: str
    content: str
    model: str


@dataclass(frozen=True)
class ExportedConversation:
    """A conversation with all its branches; parents come before children. shown: the last message
    of the branch that was shown, 0 without messages. left_out: the number of skipped entries, such
    as tool calls and hidden messages. created_at, updated_at: as in the file."""

    id: str
    title: str
    system: str
    created_at: Any
    updated_at: Any
    messages: tuple[ExportedMessage, ...]
    shown: int
    left_out: int

    @property
    def branch(self) -> tuple[ExportedMessage, ...]:
        """The messages of the branch that was shown, in order."""
        messages, at = list[ExportedMessage](), self.shown
        while at:
            messages.append(self.messages[at - 1])
            at = messages[-1].parent
        return tuple(reversed(messages))


def is_exported(value: object) -> bool:
    """Whether a JSON value is a conversation of an export, readable or not."""
    return isinstance(value, dict) and ("mapping" in value or _history(value) is not None)


def exported_title(value: object) -> str:
    """The title of a conversation in an export, or empty."""
    title = value.get("title") if isinstance(value, dict) else None
    return " ".join(title.split()) if isinstance(title, str) else ""


def exported(value: object) -> ExportedConversation:
    """Read a conversation of an export. Raises ValueError with the reason."""
    if not isinstance(value, dict):
        raise ValueError("it is not an object")
    history = _history(value)
    if history is None and "mapping" not in value:
        raise ValueError("it has no mapping")
    try:
        return _of_chatgpt(value) if history is None else _of_open_webui(value, history)
    except (KeyError, TypeError, AttributeError):
        raise ValueError("its messages do not have the format of such an export") from None


# ---- ChatGPT: conversations.json ----


def _of_chatgpt(value: Mapping[str, Any]) -> ExportedConversation:
    nodes = {
        at: _Node(node.get("parent"), node.get("children") or [], *_said(node.get("message") or {}))
        for at, node in value["mapping"].items()
        if node
    }
    return _conversation(
        nodes,
        value.get("current_node"),
        id=_text(value.get("conversation_id")) or _text(value.get("id")),
        title=exported_title(value),
        system="",
        created_at=value.get("create_time"),
        updated_at=value.get("update_time"),
    )


def _said(message: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    """(role, text, model, whether to count it as left out); no text if it is hidden or a tool's."""
    role = (message.get("author") or {}).get("role") or ""
    content, told = message.get("content") or {}, message.get("metadata") or {}
    is_hidden = told.get("is_visually_hidden_from_conversation") or role not in ROLES
    is_call = (message.get("recipient") or "all") != "all"
    if is_hidden or is_call or content.get("content_type") not in TEXT_KINDS:
        return role, "", "", role in (*ROLES, "tool")
    parts = (  # what was spoken stands in an object
        part.get("text") if isinstance(part, dict) else part for part in content.get("parts") or []
    )
    text = "\n\n".join(part for part in parts if isinstance(part, str)).strip()
    return role, text, _text(told.get("model_slug")), any(content.get("parts") or []) and not text


# ---- Open WebUI: Export Chats, and one chat as JSON ----


def _history(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The message tree in an entry of Open WebUI's export; None for any other entry."""
    chat = value.get("chat", value)
    history = chat.get("history") if isinstance(chat, dict) else None
    return history if isinstance(history, dict) and "messages" in history else None


def _of_open_webui(value: Mapping[str, Any], history: Mapping[str, Any]) -> ExportedConversation:
    chat = value.get("chat", value)
    nodes = {
        at: _Node(one.get("parentId"), one.get("childrenIds") or [], *_written(one))
        for at, one in history["messages"].items()
        if one
    }
    return _conversation(
        nodes,
        history.get("currentId"),
        id=_text(value.get("id")),
        title=exported_title(value) or exported_title(chat),
        system=_text((chat.get("params") or {}).get("system")).strip(),
        created_at=value.get("created_at"),
        updated_at=value.get("updated_at"),
    )


def _written(one: Mapping[str, Any]) -> tuple[str, str, str, bool]:
    """(role, text, model, whether to count it as left out)."""
    role, content = _text(one.get("role")), _text(one.get("content"))
    if role not in ROLES:
        return role, "", "", role != "system"
    text = (_unfolded(content) if role == "assistant" else content).strip()
    return role, text, _text(one.get("model")), not text


def _unfolded(text: str) -> str:
    """The text of an answer without its folded parts."""
    shown, at = "", 0
    while (begin := FOLD.search(text, at)) and (end := UNFOLD.search(text, begin.end())):
        shown, at = shown + text[at : begin.start()], end.end()
    return shown + text[at:]


# ---- both ----


class _Node(NamedTuple):
    """An entry in the tree of an export; text is empty if it is skipped."""

    parent: Any
    children: Sequence[Any]
    role: str
    text: str
    model: str
    is_left_out: bool


def _conversation(nodes: Mapping[str, _Node], current: Any, **facts: Any) -> ExportedConversation:
    """current: the last entry that was shown. facts: the fields that are not in the entries."""
    messages, shown = _messages(nodes, current)
    left_out = sum(node.is_left_out for node in nodes.values())
    return ExportedConversation(messages=messages, shown=shown, left_out=left_out, **facts)


def _messages(nodes: Mapping[str, _Node], current: Any) -> tuple[tuple[ExportedMessage, ...], int]:
    """(messages, id of the last one shown). Raises ValueError if the entries form a cycle."""
    roots, children = _tree(nodes)
    made: list[tuple[int, _Node, list[str]]] = []  # (parent, the first entry, texts) of each
    told = {}  # by entry: the number of the message that it became, or stands behind; 0 at first
    waiting = [(at, 0, False) for at in reversed(roots)]
    while waiting:
        at, parent, is_only = waiting.pop()  # is_only: nothing else follows the last message
        node = nodes[at]
        if node.text and is_only and made[-1][1].role == node.role:
            made[-1][2].append(node.text)  # a tool was called amid one answer
        elif node.text:
            made.append((parent, node, [node.text]))
            parent = len(made)
        told[at] = parent
        is_question = node.role == "user" and not node.text  # a picture: what follows answers it
        is_only = (is_only or bool(node.text)) and len(children[at]) == 1 and not is_question
        waiting += [(child, parent, is_only) for child in reversed(children[at])]
    if len(told) < len(nodes):
        raise ValueError("its messages form a cycle")
    messages = tuple(
        ExportedMessage(id, parent, node.role, "\n\n".join(texts), node.model)
        for id, (parent, node, texts) in enumerate(made, start=1)
    )
    shown = told.get(current) if isinstance(current, str) else None
    return messages, shown or len(messages)


def _tree(nodes: Mapping[str, _Node]) -> tuple[list[str], dict[str, list[str]]]:
    """(roots, children of each entry, in order). An entry's own parent takes precedence over the
    children that others list."""
    links = [(at, one) for at, node in nodes.items() for one in node.children if _known(one, nodes)]
    parents = {at: node.parent for at, node in nodes.items() if _known(node.parent, nodes)}
    for at, child in links:
        parents.setdefault(child, at)
    children: dict[str, dict[str, None]] = {at: {} for at in nodes}  # each once
    for at, child in (*links, *((parent, child) for child, parent in parents.items())):
        if parents[child] == at:
            children[at][child] = None
    roots = [at for at in nodes if at not in parents]
    return roots, {at: list(ids) for at, ids in children.items()}


def _known(at: Any, nodes: Mapping[str, _Node]) -> bool:
    return isinstance(at, str) and at in nodes


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""
