"""Conversation: the rows of files of conversations and prompts, in every common format.

JSON and JSONL of ShareGPT (`conversations` of from/value), UltraChat (`messages`, or `data`), TRL
(`prompt` with `completion` or `chosen`, as texts or lists), MT-Bench (`turns`), `instruction`,
`question` or `input` with an answer, and `text`; parquet of the same; the exports of ChatGPT and
Open WebUI; and plain text. Messages that are not text of either side, and rows in no such format,
are left out and counted.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.chat_exports import exported, is_exported
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, without_broken_characters

ROLES = ("system", "user", "assistant")
LISTS = ("messages", "conversations", "conversation")  # of messages
QUESTIONS = ("instruction", "prompt", "question", "query", "input")
ANSWERS = ("output", "response", "completion", "answer", "chosen")
SYSTEMS = ("system", "system_prompt")
SPEAKERS = {
    **{role: role for role in ROLES},
    "developer": "system",
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
}
TOOLS = frozenset(  # what a program said, and calls of one
    "tool tool_call tool_calls tool_response function function_call function_response observation "
    "ipython environment".split()
)
TEXT_PARTS = ("text", "input_text", "output_text")  # of a message in parts
EXPORTED = "tools, pictures or hidden"  # of an export


@dataclass(frozen=True)
class Conversation:
    """Messages of {"role", "content"}, and the place, file and line, they come from.

    text: a plain text to learn whole, instead of messages. category, number: the category and the
    question_id of a benchmark's row, where it has them. left_out: the kind of each message that is
    not text of either side.
    """

    messages: tuple[Message, ...]
    place: str
    text: str = ""
    category: str = ""
    number: int | str | None = None
    left_out: tuple[str, ...] = ()

    @property
    def asked(self) -> tuple[str, ...]:
        """The user's messages, in order."""
        return tuple(m["content"] for m in self.messages if m["role"] == "user")

    @property
    def system_messages(self) -> list[Message]:
        """A new list with a copy of the system prompt, if there is one."""
        return [dict(m) for m in self.messages if m["role"] == "system"][:1]


@dataclass(frozen=True)
class DataFile:
    """The conversations of a file, in its order. notes: what was left out, a line each."""

    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def read_conversations(path: Path, prompts: bool = False) -> DataFile:
    """All conversations of a file that can be read. prompts: only the user's messages are needed,
    so answers may be missing. Raises UsageError, with the place and the reason of the first row,
    where there are rows and none can be read."""
    read, refused = list[Conversation](), list[str]()
    for place, row in rows_of(path, prompts):
        try:
            read.append(_checked(conversation(row, place), row, prompts))
        except UsageError as error:
            refused.append(f"{place}: {error}")
    rows = len(read) + len(refused)
    if rows and not read:
        others = f" (none of the {rows - 1:,} other rows can be read either)" if rows > 1 else ""
        raise UsageError(refused[0] + others)
    notes = left_out_line(refused, f"{rows:,} rows of {path.name}"), _messages_line(read, path)
    return DataFile(tuple(read), tuple(filter(None, notes)))


def left_out_line(reasons: Sequence[str], of: str) -> str:
    """How many of `of` were left out, with the reason of the first; empty without any."""
    return f"{len(reasons):,} of {of} left out; the first: {reasons[0]}" if reasons else ""


def _messages_line(read: Iterable[Conversation], path: Path) -> str:
    kinds = Counter(kind for one in read for kind in one.left_out)
    each = ", ".join(f"{count:,} of {kind}" for kind, count in kinds.most_common())
    return f"messages of {path.name} without text are left out: {each}" if each else ""


def _checked(one: Conversation, row: Any, prompts: bool) -> Conversation:
    """The conversation with the category and the question_id of a benchmark's row. Raises
    UsageError where it lacks what is needed."""
    if prompts and not one.asked:
        raise UsageError("no message of the user to answer")
    if not prompts and not one.text and all(m["role"] != "assistant" for m in one.messages):
        raise UsageError(
            "no message of the assistant to train on: give answers, or let the backbone answer "
            "with --distill"
        )
    category, number = row.get("category"), row.get("question_id")
    if isinstance(category, str):
        one = replace(one, category=without_broken_characters(category))
    return replace(one, number=number) if isinstance(number, (int, str)) else one


# --------------------------------------------------------------------------------- one row


def conversation(row: Any, place: str) -> Conversation:
    """One row of any format. Raises UsageError with the reason why it cannot be read."""
    if isinstance(row, UnreadableRow):
        raise UsageError(row.reason)
    if not isinstance(row, dict):
        raise UsageError(f"a row must be a JSON object, this is a {type(row).__name__}")
    if is_exported(row) and not ("mapping" in row and any(key in row for key in LISTS)):
        return _exported(row, place)
    if (turns := _turns(row)) is None:
        return Conversation((), place, without_broken_characters(row["text"]))
    messages, left_out = turns
    system = next((row[key] for key in SYSTEMS if isinstance(row.get(key), str)), "")
    if system.strip() and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, place, left_out)


def _conversation(messages: Iterable[Message], place: str, left_out: Sequence[str]) -> Conversation:
    """The conversation, without halves of characters, which no tokenizer accepts."""
    mended = (
        {"role": one["role"], "content": without_broken_characters(one["content"])}
        for one in messages
    )
    return Conversation(tuple(mended), place, left_out=tuple(left_out))


def _turns(row: dict[str, Any]) -> tuple[list[Message], list[str]] | None:
    """(messages with text, the kinds of the others) of a row; None for a plain text."""
    for key in LISTS:
        if row.get(key) is not None:
            return _messages(row[key], key)
    for key in ("turns", "data"):
        if isinstance(row.get(key), list):
            return _alternating(row[key], key)
    for key in QUESTIONS:
        if row.get(key) is not None:
            return _question(row, key)
    if _is_dialogue(row.get("chosen")):
        return _messages(row["chosen"], "chosen")
    if isinstance(row.get("text"), str):
        return None
    names = ", ".join(map(repr, row))
    raise UsageError(
        'a row needs "messages", "conversations", "turns", "data", "instruction", "prompt", '
        f'"question", "input" or "text", this has {names[:80] or "nothing"}'
    )


def _exported(row: dict[str, Any], place: str) -> Conversation:
    """The branch that was shown. A second answer in a row is left out: the question between them
    had no text."""
    try:
        export = exported(row)
    except ValueError as error:
        raise UsageError(str(error)) from None
    turns: list[Message] = []
    if export.system:
        turns.append({"role": "system", "content": export.system})
    left_out = export.left_out
    for one in export.branch:
        if not turns or turns[-1]["role"] != one.role:
            turns.append({"role": one.role, "content": one.content})
        elif one.role == "user":
            turns[-1]["content"] += "\n\n" + one.content
        else:
            left_out += 1
    return _conversation(turns, place, (EXPORTED,) * left_out)


def _messages(listed: Any, key: str) -> tuple[list[Message], list[str]]:
    """The messages that have text, and the kinds of the others. A question without text loses its
    answer too. What the assistant says before and after a tool call is one message; in ShareGPT's
    format all that a speaker says in a row is one, and what comes before the first question is left
    out, as is usual in training on it."""
    if not isinstance(listed, list) or not listed:
        raise UsageError(f'"{key}" must be a list that is not empty')
    is_sharegpt = key == "conversations"
    is_asked, is_gap = not is_sharegpt, False
    turns, left_out = list[Message](), list[str]()
    for message in listed:
        name, role, text = _message(message)
        if role == "user":
            is_asked = bool(text)
        if not text or (role == "assistant" and not is_asked):
            left_out.append(name)
            is_gap = True
        elif turns and turns[-1]["role"] == role and (is_gap or is_sharegpt):
            turns[-1]["content"] += "\n\n" + text
            is_gap = False
        else:
            turns.append({"role": role, "content": text})
            is_gap = False
    return turns, left_out


def _message(message: Any) -> tuple[str, str, str]:
    """(role in the file, our role, text); no text where it is not a turn of a conversation."""
    if not isinstance(message, dict):
        raise UsageError("a message must be a JSON object")
    named = message.get("role", message.get("from"))
    name = named.lower() if isinstance(named, str) else ""
    if name in TOOLS:
        return name, "", ""
    if name not in SPEAKERS:
        given = repr(named) if isinstance(named, str) else f"a {type(named).__name__}"
        raise UsageError(f"the role is {given:.40}: give one of {', '.join(ROLES)}")
    return name, SPEAKERS[name], _text(message.get("content", message.get("value")))


def _text(content: Any) -> str:
    """A text, or the texts of a message in parts as in OpenAI's API; empty for anything else."""
    if isinstance(content, list):
        parts = (part["text"] if _is_text(part) else part for part in content)
        content = "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) and content.strip() else ""


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS
    return is_part and isinstance(part.get("text"), str)


def _alternating(listed: list[Any], key: str) -> tuple[list[Message], list[str]]:
    """ "turns" (MT-Bench) are all the user's; in "data" (UltraChat) the speakers alternate."""
    if _is_dialogue(listed):
        return _messages(listed, key)
    if not listed or not all(isinstance(text, str) for text in listed):
        raise UsageError(f'"{key}" must be a list of texts that is not empty')
    roles = ("user", "user") if key == "turns" else ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(listed)], []


def _question(row: dict[str, Any], key: str) -> tuple[list[Message], list[str]]:
    """A question with its answer, where it has one; either may be a list of messages, and the list
    of an answer may begin with the question."""
    asked, answer = row[key], next(filter(None, map(row.get, ANSWERS)), "")
    said: list[Any] = []
    if isinstance(answer, str) and answer:
        said = [{"role": "assistant", "content": answer}]
    elif isinstance(answer, list) and _is_dialogue(answer):
        said = answer
    if _is_dialogue(asked):
        return _messages([*asked, *said], key)
    if any(_message(message)[1] == "user" for message in said):
        return _messages(said, key)
    parts = [asked, (row.get("input") if key != "input" else None) or ""]
    if not all(isinstance(text, str) for text in parts) or not "".join(parts).strip():
        raise UsageError(f'"{key}" and its "input" must be text')
    question = "\n\n".join(part for part in parts if part)
    return _messages([{"role": "user", "content": question}, *said], key)


def _is_dialogue(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


# ------------------------------------------------------------------------- the rows of a file


@dataclass(frozen=True)
class UnreadableRow:
    """A row that cannot be read, and why."""

    reason: str


def rows_of(path: Path, prompts: bool) -> Iterator[tuple[str, Any]]:
    """(place, row) of a file in the format of its suffix, JSONL by default. A text file is one row,
    or one per line with `prompts`. A line that cannot be read is an UnreadableRow; raises
    UsageError for a file that cannot."""
    plain = _prompt_lines if prompts else _whole_text
    readers = {".parquet": _parquet, ".txt": plain, ".json": _json, ".csv": _refused}
    return readers.get(path.suffix.lower(), _json_lines)(path)


def _content(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _json_lines(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line := line.removeprefix(b"\xef\xbb\xbf" if number == 1 else b"").strip():
                    yield f"{path}:{number}", _value(line)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _value(line: bytes) -> Any:
    try:
        return json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return UnreadableRow(f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return UnreadableRow(f"not JSON: {_reason(error)}")


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(getattr(error, "msg", error))


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON array by their numbers; a single object is one; otherwise JSONL."""
    text = _content(path)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            yield from _json_lines(path)
            return
        line = getattr(error, "lineno", 1)
        raise UsageError(f"{path}:{line}: not JSON: {_reason(error)}") from error
    rows = whole if isinstance(whole, list) else [whole]
    for number, row in enumerate(rows, start=1):
        yield f"{path}, row {number}", row


def _refused(path: Path) -> Iterator[tuple[str, Any]]:
    raise UsageError(f"{path} is a table: give JSON, JSONL, parquet or text")


def _parquet(path: Path) -> Iterator[tuple[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise UsageError(
            f"{path} is parquet, which needs pyarrow: pip install pyarrow, or give JSON"
        ) from error
    try:
        number = 0
        for batch in parquet.ParquetFile(path).iter_batches(1024):
            for row in batch.to_pylist():
                number += 1
                given = {key: value for key, value in row.items() if value is not None}
                yield f"{path}:{number}", given
    except (ArrowException, OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as parquet: {error}") from error


def _whole_text(path: Path) -> Iterator[tuple[str, Any]]:
    """A text to learn from."""
    text = _content(path)
    if text.strip():
        yield str(path), {"text": text}


def _prompt_lines(path: Path) -> Iterator[tuple[str, Any]]:
    """A prompt per line."""
    for number, line in enumerate(_content(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line.strip()}
