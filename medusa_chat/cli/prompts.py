"""Prompts from options and files, checked and cleaned before any model is loaded."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from medusa_chat.cli.progress_line import note
from medusa_chat.errors import UsageError
from medusa_chat.messages import Message, Prompt, without_broken_characters

ROLES = ("system", "user", "assistant")
MAX_FILE_BYTES = 10_000_000


def read_prompts(
    prompt: str | None, prompt_file: Path | None, messages: Path | None, prompts: Path | None
) -> list[Prompt]:
    """What to answer, from the one source given: texts and conversations. Raises UsageError."""
    sources = {
        "--prompt": prompt,
        "--prompt-file": prompt_file,
        "--messages": messages,
        "--prompts": prompts,
    }
    given = [name for name, value in sources.items() if value is not None]
    if len(given) != 1:
        got = " and ".join(given) or "none"
        raise UsageError(f"give exactly one of {', '.join(sources)}; got {got}")
    if prompt is not None:
        return [clean_text(prompt, "--prompt")]
    if prompt_file is not None:
        text = read_file(prompt_file).removesuffix("\n")  # as $(...) takes what a command prints
        is_input = str(prompt_file) == "-"
        return [clean_text(text, "the standard input" if is_input else str(prompt_file))]
    if messages is not None:
        return [conversation(parse_json(read_file(messages), str(messages)), str(messages))]
    assert prompts is not None
    return read_rows(prompts)


def read_rows(file: Path) -> list[Prompt]:
    """Prompts of a JSONL file, a {"prompt": text} or {"messages": [...]} a line."""
    rows: list[Prompt] = []
    for number, line in enumerate(read_file(file).split("\n"), start=1):
        where = f"{file} line {number}"
        if not line.strip():
            continue
        row = parse_json(line, where)
        if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
            raise UsageError(f'{where}: give {{"prompt": text}} or {{"messages": [...]}}')
        if "messages" in row:
            rows.append(conversation(row["messages"], where))
        elif isinstance(row["prompt"], str):
            rows.append(clean_text(row["prompt"], where))
        else:
            raise UsageError(f"{where}: prompt must be a string")
    if not rows:
        raise UsageError(f"{file} holds no prompts: write one per line")
    return rows


def read_file(file: Path) -> str:
    """A UTF-8 text of at most 10 MB; line ends as \\n, no byte order mark. "-" is the standard
    input. Raises UsageError."""
    try:
        with nullcontext(sys.stdin.buffer) if str(file) == "-" else open(file, "rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{file} is not UTF-8 text (byte {error.start}): save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot read {file}: {reason}") from None
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"{file} is larger than {MAX_FILE_BYTES // 1_000_000} MB: split it")
    return text.replace("\r\n", "\n")


def parse_json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON: {error}") from None


def conversation(value: Any, where: str) -> list[Message]:
    """Checked messages: {"role", "content"} texts, the last of the user. Raises UsageError."""
    if not isinstance(value, list) or not value:
        raise UsageError(f'{where}: give a list of {{"role": ..., "content": ...}}')
    for position, entry in enumerate(value, start=1):
        problem = _wrong_in(entry)
        if problem:
            raise UsageError(f"{where}, message {position}: {problem}")
    if value[-1]["role"] != "user":
        raise UsageError(f"{where}, message {len(value)}: the last message must be the user's")
    last = f"{where}, message {len(value)}"
    head = [{**entry, "content": _mended(entry["content"])} for entry in value]
    return [*head[:-1], {"role": "user", "content": clean_text(head[-1]["content"], last)}]


def _wrong_in(entry: Any) -> str:
    if not isinstance(entry, dict) or set(entry) != {"role", "content"}:
        return 'give exactly {"role": ..., "content": ...}'
    if entry["role"] not in ROLES:
        return f"role is {entry['role']!r}: choose one of {', '.join(ROLES)}"
    return "" if isinstance(entry["content"], str) else "content is not a text"


def clean_text(text: str, where: str) -> str:
    """A prompt fit for any tokenizer. Raises UsageError when nothing is in it."""
    text = _mended(text)
    if not text.strip():
        raise UsageError(f"{where} is empty: write a prompt")
    return text


def _mended(text: str) -> str:
    """without_broken_characters, and stderr says what was changed."""
    mended = without_broken_characters(text)
    if broken := mended.count("\ufffd") - text.count("\ufffd"):
        note(f"note: {broken} broken characters of the prompt were replaced by U+FFFD")
    if nulls := text.count("\0"):
        note(f"note: {nulls} null bytes were removed from the prompt")
    return mended


def as_asked(prompt: Prompt, raw: bool) -> Prompt:
    """A text as it is when raw, else as a conversation of one message."""
    if raw and not isinstance(prompt, str):
        raise UsageError("--raw needs a prompt, not messages: omit --raw, or use --prompt")
    return prompt if raw or not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
