"""Conversation: the rows of files of conversations and prompts, in every common format.

JSON and JSONL of ShareGPT (`conversations` of from/value), UltraChat (`messages`, or `data`),
MT-Bench (`turns`), AlpacaEval (`instruction`), `prompt` and `text` rows; parquet of the same; and
plain text. Errors name the file, and the line or number of a row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, without_broken_characters
from medusa_chat.training.data_files import rows_of

ROLES = ("system", "user", "assistant")
ANSWERS = ("output", "response", "completion", "answer")  # to an instruction or a prompt
SPEAKERS = {
    **{role: role for role in ROLES},
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "model"), "assistant"),
}


@dataclass(frozen=True)
class Conversation:
    """Messages of {"role", "content"}, and the place, file and line, they come from.

    text: a plain text that is learnt whole, in place of messages. category, number: the category
    and the question_id of a benchmark's row, where it has them.
    """

    messages: tuple[Message, ...]
    place: str
    text: str = ""
    category: str = ""
    number: int | str | None = None

    @property
    def asked(self) -> tuple[str, ...]:
        """The user's messages, in order."""
        return tuple(m["content"] for m in self.messages if m["role"] == "user")

    @property
    def system_messages(self) -> list[Message]:
        """A new list with a copy of the system prompt, if there is one."""
        return [dict(m) for m in self.messages if m["role"] == "system"][:1]


def read_conversations(path: Path, prompts: bool = False) -> Iterator[Conversation]:
    """The rows of a file. prompts: only the user's messages are needed, so answers may be missing.

    Rows of ShareGPT that begin with an answer lose it, and those without a message of the user are
    left out, as is usual for training on it. Raises UsageError with the line of a bad row.
    """
    for place, row in rows_of(path, prompts):
        found = conversation(row, place)
        if found is None:
            continue
        if not prompts and not found.text and not _has_answer(found):
            raise UsageError(
                f"{place}: no message of the assistant to train on: give answers, or let the "
                "backbone answer with --distill"
            )
        if prompts and not found.asked:
            raise UsageError(f"{place}: no message of the user to answer: remove the row")
        yield _with_labels(found, row)


def _with_labels(found: Conversation, row: Any) -> Conversation:
    """The conversation with the category and the question_id of a benchmark's row."""
    values = row if isinstance(row, dict) else {}
    category, number = values.get("category"), values.get("question_id")
    if isinstance(category, str):
        found = replace(found, category=category)
    return replace(found, number=number) if isinstance(number, (int, str)) else found


def conversation(row: Any, place: str) -> Conversation | None:
    """One row of any format; None for an empty one of ShareGPT. Raises UsageError."""
    row = _mended(row)
    if not isinstance(row, dict):
        raise UsageError(f"{place}: a row must be a JSON object, this is {str(row)[:40]!r}")
    if "messages" in row:
        return Conversation(_messages(row["messages"], "messages", place), place)
    if "conversations" in row:
        return _sharegpt(row["conversations"], place)
    for key in ("turns", "data"):
        if isinstance(row.get(key), list):
            return Conversation(_alternating(row[key], key, place), place)
    for key in ("instruction", "prompt"):
        if key in row:
            return Conversation(_question(row, key, place), place)
    if isinstance(row.get("text"), str):
        return Conversation((), place, row["text"])
    raise UsageError(
        f'{place}: a row needs "messages", "conversations", "turns", "data", "instruction", '
        f'"prompt" or "text", this has {", ".join(map(str, row))[:80] or "nothing"}'
    )


def _mended(value: Any) -> Any:
    """A row whose texts hold no half of a character, which no tokenizer takes."""
    if isinstance(value, str):
        return without_broken_characters(value)
    if isinstance(value, list):
        return [_mended(one) for one in value]
    return {k: _mended(v) for k, v in value.items()} if isinstance(value, dict) else value


def _has_answer(found: Conversation) -> bool:
    return any(message["role"] == "assistant" for message in found.messages)


def _messages(found: Any, key: str, place: str) -> tuple[Message, ...]:
    if not isinstance(found, list) or not found:
        raise UsageError(f'{place}: "{key}" must be a list that is not empty')
    return tuple(_message(message, place) for message in found)


def _message(message: Any, place: str) -> Message:
    if not isinstance(message, dict):
        raise UsageError(f"{place}: a message must be a JSON object")
    named = message.get("role", message.get("from"))
    role, content = SPEAKERS.get(str(named)), message.get("content", message.get("value"))
    if role is None:
        raise UsageError(f"{place}: the role {named!r:.40} is none of {', '.join(ROLES)}")
    if isinstance(content, list) and all(_is_text(part) for part in content):
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise UsageError(f"{place}: the content of a message must be text")
    return {"role": role, "content": content}


def _is_text(part: Any) -> bool:
    """Whether it is a part of a message as OpenAI's API has them, with text."""
    return isinstance(part, dict) and isinstance(part.get("text"), str)


def _sharegpt(found: Any, place: str) -> Conversation | None:
    """The messages from the user's first on; consecutive ones of a speaker are joined."""
    if found == []:
        return None
    turns: list[Message] = []
    for message in _messages(found, "conversations", place):
        if turns and turns[-1]["role"] == message["role"]:
            turns[-1]["content"] += "\n\n" + message["content"]
        elif message["role"] != "assistant" or any(turn["role"] == "user" for turn in turns):
            turns.append(message)
    spoken = {turn["role"] for turn in turns}
    return Conversation(tuple(turns), place) if "user" in spoken else None


def _alternating(found: list[Any], key: str, place: str) -> tuple[Message, ...]:
    """ "turns" (MT-Bench) are all the user's; in "data" (UltraChat) the speakers alternate."""
    if not found or not all(isinstance(text, str) for text in found):
        raise UsageError(f'{place}: "{key}" must be a list of texts that is not empty')
    roles = ("user", "user") if key == "turns" else ("user", "assistant")
    return tuple({"role": roles[i % 2], "content": text} for i, text in enumerate(found))


def _question(row: dict[str, Any], key: str, place: str) -> tuple[Message, ...]:
    parts = [row[key], row.get("input") or ""]
    answer = next(filter(None, map(row.get, ANSWERS)), "")
    if not all(isinstance(text, str) for text in (*parts, answer)) or not row[key]:
        raise UsageError(f'{place}: "{key}", its "input" and its answer must be text')
    asked = {"role": "user", "content": "\n\n".join(part for part in parts if part)}
    return (asked, {"role": "assistant", "content": answer}) if answer else (asked,)
