"""The rows of JSON, JSONL, parquet and text files, each with its place: the file and the line."""

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_chat.errors import UsageError


def rows_of(path: Path, prompts: bool) -> Iterator[tuple[str, Any]]:
    """(place, row) of a file in the format its name says, JSONL where it says none. A text file is
    one row, or with `prompts` one a line. Raises UsageError with the line that cannot be read."""
    plain = _prompts if prompts else _whole
    readers = {".parquet": _parquet, ".txt": plain, ".json": _json, ".csv": _refused}
    return readers.get(path.suffix.lower(), _lines)(path)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                yield place, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{place}: not JSON: {_reason(error)}") from error


def _reason(error: ValueError | RecursionError) -> str:
    return str(getattr(error, "msg", "nested too deeply"))


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON array, each with the line it begins in and, where others do too, its
    number; a single object is one row; otherwise as in JSONL."""
    text = _text(path)
    at = len(text) - len(text.lstrip())
    if text[at : at + 1] != "[":
        whole = _object(text)
        yield from _lines(path) if whole is None else [(f"{path}:1", whole)]
        return
    decoder, line, counted, at, before = json.JSONDecoder(), 1, 0, at + 1, 0
    for number in itertools.count(1):
        while at < len(text) and text[at] in " \t\r\n,":
            at += 1
        line, counted = line + text.count("\n", counted, at), at
        if text[at : at + 1] == "]":
            if rest := text[at + 1 :].strip():
                raise UsageError(f"{path}:{line}: after the array comes {rest[:20]!r}: remove it")
            return
        try:
            row, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path}:{line}: not JSON: {_reason(error)}") from error
        yield f"{path}:{line}" + (f", row {number}" if line == before else ""), row
        before = line


def _object(text: str) -> Any:
    """The only JSON object of a text; None where it is something else."""
    try:
        return found if isinstance(found := json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


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
                kept = {key: value for key, value in row.items() if value is not None}
                yield f"{path}:{number}", kept
    except (ArrowException, OSError) as error:
        raise UsageError(f"{path} cannot be read as parquet: {error}") from error


def _whole(path: Path) -> Iterator[tuple[str, Any]]:
    """A text to learn from."""
    text = _text(path)
    if text.strip():
        yield str(path), {"text": text}


def _prompts(path: Path) -> Iterator[tuple[str, Any]]:
    """A prompt a line."""
    for number, line in enumerate(_text(path).split("\n"), start=1):
        if line.strip():
            yield f"{path}:{number}", {"prompt": line.strip()}
