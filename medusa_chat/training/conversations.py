"""Conversation: the rows of files of conversations and prompts, in every common format.

JSON and JSONL of ShareGPT (`conversations` of from/value), UltraChat (`messages`, or `data`), TRL
(`prompt` with `completion` or `chosen`, as texts or lists), MT-Bench (`turns`), `instruction`,
`question` or `input` with an answer, and `text`; parquet of the same; the exports of ChatGPT and
Open WebUI; and plain text. What is no text of a turn, and a row that is none of these, is left out.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.chat_exports import exported, is_exported
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, without_broken_characters
from medusa_chat.training.data_files import Unreadable, rows_of

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
TOOLS = (  # what a program said, and calls of one
    *("tool", "tool_call", "tool_calls", "tool_response", "function", "function_call"),
    *("function_response", "observation", "ipython", "environment"),
)
EXPORTED = "tools, pictures or hidden"  # of an export


@dataclass(frozen=True)
class Conversation:
    """Messages of {"role", "content"}, and the place, file and line, they come from.

    text: a plain text that is learnt whole, in place of messages. category, number: the category
    and the question_id of a benchmark's row, where it has them. left_out: of each message that is
    no text of a turn, what it is.
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
    """The conversations of a file, in its order. notes: what of it was left out, a line each."""

    conversations: tuple[Conversation, ...]
    notes: tuple[str, ...] = ()


def read_conversations(path: Path, prompts: bool = False) -> DataFile:
    """All of a file that can be read. prompts: only the user's messages are needed, so answers may
    be missing. Raises UsageError, with the place and the reason of the first row, where there are
    rows and none can be read."""
    found, refused = list[Conversation](), list[str]()
    for place, row in rows_of(path, prompts):
        try:
            found.append(_checked(conversation(row, place), row, prompts))
        except UsageError as error:
            refused.append(f"{place}: {error}")
    rows = len(found) + len(refused)
    if rows and not found:
        others = f" (none of the {rows - 1:,} other rows can be read either)" if rows > 1 else ""
        raise UsageError(refused[0] + others)
    notes = left_out_line(refused, f"{rows:,} rows of {path.name}"), _messages_line(found, path)
    return DataFile(tuple(found), tuple(filter(None, notes)))


def left_out_line(reasons: Sequence[str], of: str) -> str:
    """A line on what was left out of so many, with the reason of the first; empty without any."""
    return f"{len(reasons):,} of {of} left out; the first: {reasons[0]}" if reasons else ""


def _messages_line(found: Iterable[Conversation], path: Path) -> str:
    kinds = Counter(kind for one in found for kind in one.left_out)
    each = ", ".join(f"{count:,} of {kind}" for kind, count in kinds.most_common())
    return f"messages of {path.name} that are no text are left out: {each}" if each else ""


def _checked(found: Conversation, row: Any, prompts: bool) -> Conversation:
    """The conversation with the category and the question_id of a benchmark's row. Raises
    UsageError where it lacks what is needed of it."""
    if prompts and not found.asked:
        raise UsageError("no message of the user to answer")
    if not prompts and not found.text and all(m["role"] != "assistant" for m in found.messages):
        raise UsageError(
            "no message of the assistant to train on: give answers, or let the backbone answer "
            "with --distill"
        )
    category, number = row.get("category"), row.get("question_id")
    if isinstance(category, str):
        found = replace(found, category=without_broken_characters(category))
    return replace(found, number=number) if isinstance(number, (int, str)) else found


def conversation(row: Any, place: str) -> Conversation:
    """One row of any format. Raises UsageError: why it is none."""
    if isinstance(row, Unreadable):
        raise UsageError(row.reason)
    if not isinstance(row, dict):
        raise UsageError(f"a row must be a JSON object, this is a {type(row).__name__}")
    if is_exported(row) and not ("mapping" in row and any(key in row for key in LISTS)):
        return _exported(row, place)
    if (found := _turns(row)) is None:
        return Conversation((), place, without_broken_characters(row["text"]))
    messages, left_out = found
    system = next((row[key] for key in SYSTEMS if isinstance(row.get(key), str)), "")
    if system.strip() and all(message["role"] != "system" for message in messages):
        messages.insert(0, {"role": "system", "content": system})
    return _conversation(messages, place, left_out)


def _conversation(messages: Iterable[Message], place: str, left_out: Sequence[str]) -> Conversation:
    """The conversation, without halves of characters, which no tokenizer takes."""
    mended = (
        {"role": one["role"], "content": without_broken_characters(one["content"])}
        for one in messages
    )
    return Conversation(tuple(mended), place, left_out=tuple(left_out))


def _turns(row: dict[str, Any]) -> tuple[list[Message], list[str]] | None:
    """(the messages of a row that have text, what the others are); None for a plain text."""
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
    """The branch that was shown. An answer behind an answer is left out: the question between them
    had no text."""
    try:
        found = exported(row)
    except ValueError as error:
        raise UsageError(str(error)) from None
    turns: list[Message] = [{"role": "system", "content": found.system}] if found.system else []
    left_out = found.left_out
    for one in found.branch:
        if not turns or turns[-1]["role"] != one.role:
            turns.append({"role": one.role, "content": one.content})
        elif one.role == "user":
            turns[-1]["content"] += "\n\n" + one.content
        else:
            left_out += 1
    return _conversation(turns, place, (EXPORTED,) * left_out)


def _messages(found: Any, key: str) -> tuple[list[Message], list[str]]:
    """The messages that have text, and what the others are. With a question without text its
    answer is left out. What the assistant says before and after a call of a tool is one message;
    in ShareGPT's format all that a speaker says at once is one, and what comes before the first
    question is left out, as is usual for training on it."""
    if not isinstance(found, list) or not found:
        raise UsageError(f'"{key}" must be a list that is not empty')
    is_sharegpt = key == "conversations"
    is_asked, is_gap = not is_sharegpt, False
    turns, left_out = list[Message](), list[str]()
    for message in found:
        named, role, text = _message(message)
        if role == "user":
            is_asked = bool(text)
        if not text or (role == "assistant" and not is_asked):
            left_out.append(named)
            is_gap = True
        elif turns and turns[-1]["role"] == role and (is_gap or is_sharegpt):
            turns[-1]["content"] += "\n\n" + text
            is_gap = False
        else:
            turns.append({"role": role, "content": text})
            is_gap = False
    return turns, left_out


def _message(message: Any) -> tuple[str, str, str]:
    """(role as it stands there, ours, text): without text where it is no turn of a conversation."""
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
    """A text, or the texts of a message in parts as OpenAI's API has them; empty for all else."""
    if isinstance(content, list):
        parts = (part["text"] if _is_text(part) else part for part in content)
        content = "".join(part for part in parts if isinstance(part, str))
    return content if isinstance(content, str) and content.strip() else ""


def _is_text(part: Any) -> bool:
    kinds = ("text", "input_text", "output_text")
    is_part = isinstance(part, dict) and part.get("type", "text") in kinds
    return is_part and isinstance(part.get("text"), str)


def _alternating(found: list[Any], key: str) -> tuple[list[Message], list[str]]:
    """ "turns" (MT-Bench) are all the user's; in "data" (UltraChat) the speakers alternate."""
    if _is_dialogue(found):
        return _messages(found, key)
    if not found or not all(isinstance(text, str) for text in found):
        raise UsageError(f'"{key}" must be a list of texts that is not empty')
    roles = ("user", "user") if key == "turns" else ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(found)], []


def _question(row: dict[str, Any], key: str) -> tuple[list[Message], list[str]]:
    """A question with its answer, where it has one; either may be a list of messages, and an answer
    such a list with the question in it."""
    asked, answer = row[key], next(filter(None, map(row.get, ANSWERS)), "")
    is_answered = isinstance(answer, str) and answer
    said: list[Any] = [{"role": "assistant", "content": answer}] if is_answered else []
    if _is_dialogue(answer):
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
