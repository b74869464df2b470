"""All conversations as one JSON file, and such a file, or another program's, read again.

docs/conversations.md has the format. chat_exports.py reads those of ChatGPT and Open WebUI.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from json.scanner import py_make_scanner  # type: ignore[attr-defined]
from typing import Any, NamedTuple

from medusa_chat.chat_exports import (
    ExportedConversation,
    exported,
    exported_title,
    is_exported,
)
from medusa_chat.decoding.reasoning import read as read_answer
from medusa_chat.errors import UsageError
from medusa_chat.messages import without_broken_characters
from medusa_chat.runtime.answer_figures import AnswerFigures
from medusa_chat.runtime.stored_conversation import (
    ROLES,
    MessageTree,
    Said,
    StoredConversation,
    title_of,
)
from medusa_chat.ui.page.inputs import ID, MAX_TITLE, OTHERS, SETTINGS, WHOLE, clean, refusal

FORMAT, VERSION = "medusa-chat conversations", 1
MAX_CONVERSATIONS = 10_000
MAX_MESSAGES = 10_000  # of one conversation
MAX_OF_ALL = 200_000
MAX_LISTS = 2_000_000  # and objects in a file: a message of any program has some ten
MAX_NAMED, MAX_NAME = 3, 40  # of the entries that were left out, and characters of each
MAX_MODEL = 1000  # characters of its name
MAX_ID = 2**53  # of a message: beyond it JSON's numbers are not whole everywhere
NAMES = (*SETTINGS, *WHOLE, *OTHERS)  # of settings
CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]+")


class ReadFile(NamedTuple):
    """conversations: each with its id, empty where it has none. left_out: the name of every entry
    of another program's export that cannot be read, and why."""

    conversations: list[tuple[str, StoredConversation]]
    left_out: list[str]

    @property
    def left_out_line(self) -> str:
        """What was left out, in words; empty where all was read."""
        named, more = self.left_out[:MAX_NAMED], len(self.left_out) - MAX_NAMED
        rest = f" and {more:,} more" if more > 0 else ""
        return f"{len(self.left_out):,} left out: {', '.join(named)}{rest}" if named else ""


def written(kept: Iterable[tuple[str, StoredConversation]]) -> str:
    """The file, a conversation a line. kept: each with its id."""
    lines = (json.dumps(_plain(id, one), ensure_ascii=False) for id, one in kept)
    begin = f'{{"format": "{FORMAT}", "version": {VERSION}, "conversations": [\n'
    return begin + ",\n".join(lines) + "\n]}\n"


def _plain(id: str, kept: StoredConversation) -> dict[str, Any]:
    names = ("id", "parent", "role", "content", "note", "reasoning")
    messages = [
        {name: getattr(one, name) for name in names}
        | {"model": one.figures.model if one.figures else ""}
        for one in kept.tree.said.values()
    ]
    return {
        "id": id,
        "title": kept.title,
        "created_at": kept.created_at,
        "updated_at": kept.updated_at,
        "system": kept.system,
        "settings": kept.settings,
        "messages": messages,
        "shown": kept.tree.leaf,
    }


def read(data: bytes, trees: Sequence[str]) -> ReadFile:
    """The conversations of a file of ours, all or none, or of another program's export. trees:
    presets that a setting may name. Raises UsageError: one line, what is wrong and where."""
    if data.startswith(b"PK"):
        raise UsageError("it is a ZIP archive: unpack it, and choose the JSON file in it")
    values = _values(data)
    entries = values if isinstance(values, list) else [values]
    if any(is_exported(entry) for entry in entries):
        return _of_export(entries, trees)
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise UsageError("it holds no conversations of medusa-chat, ChatGPT or Open WebUI")
    if values.get("version") != VERSION:
        raise UsageError(f"its version is {_short(values.get('version'))}: {VERSION} can be read")
    conversations: list[tuple[str, StoredConversation]] = []
    for number, one in enumerate(_list(values, "conversations", MAX_CONVERSATIONS), start=1):
        try:
            conversations.append(_conversation(one, trees))
        except UsageError as error:
            raise UsageError(f"conversation {number}: {error}") from None
    return _few(ReadFile(conversations, []))


def _of_export(entries: Sequence[object], trees: Sequence[str]) -> ReadFile:
    """The conversations in which something was said. Raises UsageError where none can be read."""
    conversations, left_out = list[tuple[str, StoredConversation]](), list[str]()
    for number, entry in enumerate(entries, start=1):
        title = _line(without_broken_characters(exported_title(entry)))
        try:
            one = exported(entry)
            if one.messages:
                conversations.append(_conversation(_translated(one), trees))
        except (ValueError, UsageError) as error:
            name = f"“{title[:MAX_NAME]}”" if title else f"number {number:,}"
            left_out.append(f"{name} ({error})")
    read = ReadFile(conversations, left_out)
    if not conversations:
        raise UsageError(read.left_out_line or "it has no messages")
    return _few(read)


def _few(read: ReadFile) -> ReadFile:
    """The file, which holds no more than can be taken in. Raises UsageError."""
    if len(read.conversations) > MAX_CONVERSATIONS:
        raise UsageError(f"it has more than {MAX_CONVERSATIONS:,} conversations: divide it")
    if sum(len(one.tree.said) for _, one in read.conversations) > MAX_OF_ALL:
        raise UsageError(f"it has more than {MAX_OF_ALL:,} messages: divide it")
    return read


def _translated(one: ExportedConversation) -> dict[str, Any]:
    """A conversation of an export in the form of our own file."""
    return {
        "id": one.id if ID.fullmatch(one.id) else "",
        "title": one.title[:MAX_TITLE],
        "system": one.system,
        "created_at": one.created_at,
        "updated_at": one.updated_at,
        "messages": [message._asdict() for message in one.messages],
        "shown": one.shown,
    }


class _PatientDecoder(json.JSONDecoder):
    """Reads JSON in Python and not in C, which would hold every other thread, and so every tab,
    until it is done: seconds for a file of millions of empty lists. Raises UsageError for one of
    more than MAX_LISTS."""

    def __init__(self) -> None:
        super().__init__()
        self._lists = 0
        self.parse_array = self._counted(self.parse_array)
        self.parse_object = self._counted(self.parse_object)
        self.scan_once = py_make_scanner(self)

    def _counted(self, parse: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*values: Any) -> Any:
            self._lists += 1
            if self._lists > MAX_LISTS:
                raise UsageError(f"it has more than {MAX_LISTS:,} lists and objects: divide it")
            return parse(*values)

        return counted


def _values(data: bytes) -> Any:
    try:
        return _PatientDecoder().decode(data.decode(json.detect_encoding(data), "surrogatepass"))
    except (ValueError, RecursionError):
        raise UsageError("it is not valid JSON") from None


def _conversation(values: object, trees: Sequence[str]) -> tuple[str, StoredConversation]:
    one = _object(values)
    id = one.get("id", "")
    if not isinstance(id, str) or not (ID.fullmatch(id) or not id):
        raise UsageError(f"its id is {_short(id)}: give up to 100 letters, digits, - and _")
    settings = _object(one.get("settings", {}))
    named = [(name, settings[name]) for name in NAMES if name in settings]
    valid = {name: value for name, value in named if not refusal(name, value, trees)}
    title, tree = clean("the title", one.get("title", ""), MAX_TITLE), _tree(one)
    title = _line(title)
    return id, StoredConversation(
        tree,
        clean("the system prompt", one.get("system", "")).strip(),
        {name: clean(name, one) if isinstance(one, str) else one for name, one in valid.items()},
        "" if title == title_of(tree) else title,
        created := _time(one, "created_at", time.time()),
        _time(one, "updated_at", created),
    )


def _tree(one: Mapping[str, Any]) -> MessageTree:
    messages = [_said(values) for values in _list(one, "messages", MAX_MESSAGES)]
    said = {message.id: message for message in sorted(messages, key=lambda message: message.id)}
    if not messages or len(said) < len(messages):
        raise UsageError("it has no messages, or two with one id")
    leaf = one.get("shown", max(said))
    tree = MessageTree(said, 0, max(said)).to_json()
    try:
        return MessageTree.from_json({**tree, "leaf": leaf})
    except ValueError as error:
        raise UsageError(str(error)) from None


def _said(values: object) -> Said:
    one = _object(values)
    numbers = [one.get("id"), one.get("parent")]
    if not all(type(number) is int and 0 <= number < MAX_ID for number in numbers):
        raise UsageError("a message's id or parent is no whole number from 0")
    if one.get("role") not in ROLES:
        raise UsageError(f"a role is {_short(one.get('role'))}: give one of {', '.join(ROLES)}")
    content = clean("a message", one.get("content"))
    note, reasoning = (clean(f"a {name}", one.get(name, "")) for name in ("note", "reasoning"))
    if one["role"] == "assistant" and not reasoning:
        reasoning, content = read_answer(content)  # as older files and other programs have it
    model = clean("a model", one.get("model", ""), MAX_MODEL)
    figures = AnswerFigures(model) if model and one["role"] == "assistant" else None
    return Said(*numbers, one["role"], content, note, figures=figures, reasoning=reasoning)


def _time(one: Mapping[str, Any], name: str, usual: float) -> float:
    """Unix time, never later than now. usual: where it is not given."""
    value = usual if one.get(name) is None else one[name]
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        raise UsageError(f"{name} is {_short(value)}: give seconds since 1970")
    return float(min(value, time.time()))


def _line(text: str) -> str:
    """The text in one line, without control characters."""
    return " ".join(CONTROLS.sub(" ", text).split())


def _short(value: object) -> str:
    """A value for an error line, whatever it is."""
    return f"a {type(value).__name__}" if isinstance(value, list | dict) else f"{value!r:.40}"


def _object(value: object) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise UsageError(f"it has a {type(value).__name__} in the place of an object")
    return value


def _list(values: Mapping[str, Any], name: str, most: int) -> list[Any]:
    items = values.get(name)
    if not isinstance(items, list) or len(items) > most:
        raise UsageError(f"its {name} are not a list of at most {most:,}")
    return items
