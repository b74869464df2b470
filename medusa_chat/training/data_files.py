"""The rows of JSON, JSONL, parquet and text files, each with its place: file, and line or row."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from medusa_chat.errors import UsageError


class Unreadable(NamedTuple):
    """A row that cannot be read, and why."""

    reason: str


def rows_of(path: Path, prompts: bool) -> Iterator[tuple[str, Any]]:
    """(place, row) of a file in the format its name says, JSONL where it says none. A text file is
    one row, or with `prompts` one a line. A line that cannot be read is Unreadable; raises
    UsageError for a file that cannot."""
    plain = _prompts if prompts else _whole
    readers = {".parquet": _parquet, ".txt": plain, ".json": _json, ".csv": _refused}
    return readers.get(path.suffix.lower(), _lines)(path)


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as UTF-8 text: {error}") from error


def _lines(path: Path) -> Iterator[tuple[str, Any]]:
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
        return Unreadable(f"not UTF-8 text: {error.reason}")
    except (ValueError, RecursionError) as error:
        return Unreadable(f"not JSON: {_reason(error)}")


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return str(getattr(error, "msg", error))


def _json(path: Path) -> Iterator[tuple[str, Any]]:
    """The rows of a JSON array by their numbers; a single object is one; otherwise as in JSONL."""
    text = _text(path)
    try:
        whole = json.loads(text)
    except (ValueError, RecursionError) as error:
        if not text.lstrip().startswith("["):
            yield from _lines(path)
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
                kept = {key: value for key, value in row.items() if value is not None}
                yield f"{path}:{number}", kept
    except (ArrowException, OSError, UnicodeDecodeError) as error:
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
