"""Traces: the events of answers as JSON lines, and StepStore, which keeps them on disk."""

import gzip
import json
import math
import os
import shutil
import threading
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from functools import cache
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from medusa_chat.decoding.events import DraftRecord, Event, Finished, Learnt, Prefilled, Stats, Step
from medusa_chat.paths import write_bytes

if TYPE_CHECKING:
    from pydantic import TypeAdapter

KINDS: dict[str, type[Event]] = {"prefilled": Prefilled, "step": Step, "finished": Finished}
NAMES = {kind: name for name, kind in KINDS.items()}
NUMBERS = ("temperature", "posterior_threshold", "posterior_alpha")  # settings the page draws
PER_NODE = (
    *("parents", "ranks", "draft_probabilities", "probabilities", "entropies", "thresholds"),
    "sampled",
)


def to_json(event: Event) -> dict[str, Any]:
    """The event as a trace line; a number that is not finite becomes null."""
    return {"event": NAMES[type(event)], **_plain(event)}


def from_json(values: Any) -> Event:
    """The event of one trace line. Unknown fields are ignored. Raises ValueError for a line that is
    not an event, has a value of another type, or has nodes that do not form a tree."""
    name = values.get("event") if isinstance(values, dict) else None
    if not isinstance(name, str) or name not in KINDS:
        raise ValueError(f"not a trace line: event is {name!r:.80}")
    event: Event = _reader(name).validate_python(values)
    if isinstance(event, Prefilled):
        _require_numbers(event.settings)
    if isinstance(event, Step) and event.draft is not None:
        _require_tree(event.draft, event.path)
    return event


@cache
def _reader(name: str) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter  # takes 0.1 s, and writing traces does not need it

    return TypeAdapter(KINDS[name])


def _require_numbers(settings: Mapping[str, Any]) -> None:
    for name in NUMBERS:
        if type(settings.get(name)) not in (int, float, NoneType):
            raise ValueError(f"the setting {name} is not a number")


def _require_tree(draft: DraftRecord, path: Sequence[int]) -> None:
    """Raises ValueError if a list lacks an entry per node, or names a node that does not exist."""
    nodes = len(draft.tokens)
    if any(len(getattr(draft, name)) != nodes for name in PER_NODE):
        raise ValueError("a list of the draft has not an entry per node")
    if any(len(getattr(draft, name)) not in (0, nodes) for name in ("texts", "sources")):
        raise ValueError("a list of the draft has not an entry per node")
    if any(not -1 <= parent < node for node, parent in enumerate(draft.parents)):
        raise ValueError("a parent does not come before its children")
    if any(not 0 <= node < nodes for node in path):
        raise ValueError("the path has a node that does not exist")


def _plain(value: Any) -> Any:
    if isinstance(value, (Prefilled, Step, Finished, DraftRecord, Stats, Learnt)):
        names = (f.name for f in fields(value) if f.name != "logprobs")
        return {name: _plain(getattr(value, name)) for name in names}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


FOLDER = "steps"
MOST_BYTES = 500_000_000  # of all files together
LARGEST = 400_000_000  # bytes of one answer's lines: a larger file is not ours
LEVEL = 5


class StepStore:
    """The steps of the owner's answers, by conversation (its id) and message. Safe for any thread;
    if the disk cannot be read or written, only the steps are missing."""

    def __init__(self, folder: Path, most: int = MOST_BYTES) -> None:
        self.folder = folder
        self.most = most
        self._lock = threading.Lock()
        self._bytes: int | None = None  # upper limit for all files, counted again when too high

    def save(self, conversation: str, message: int, events: Sequence[Event]) -> None:
        """Write the events of an answer; the oldest ones are deleted to make room."""
        lines = "".join(json.dumps(to_json(event), ensure_ascii=False) + "\n" for event in events)
        data = gzip.compress(lines.encode("utf-8", "replace"), LEVEL)
        if len(data) > self.most:
            return
        with self._lock, suppress(OSError):
            if self._bytes is None:
                self._bytes = sum(size for _, size, _ in self._files())
            file = self._file(conversation, message)
            before = file.stat().st_size if file.exists() else 0
            write_bytes(file, data)
            self._bytes += len(data) - before
            if self._bytes > self.most:
                self._make_room()

    def load(self, conversation: str, message: int) -> list[Event]:
        """The events of an answer; empty if they are missing or cannot be read."""
        try:
            with gzip.open(self._file(conversation, message)) as stream:
                data = stream.read(LARGEST + 1)
            if len(data) > LARGEST:
                return []
            return _whole([from_json(_values(line)) for line in data.splitlines()])
        except (OSError, EOFError, zlib.error, ValueError, RecursionError):
            return []

    def delete(self, conversation: str) -> None:
        """Remove all steps of a conversation."""
        with self._lock:
            shutil.rmtree(self.folder / conversation, ignore_errors=True)

    def _make_room(self) -> None:
        """Delete the oldest files until a tenth of the room is free."""
        files = sorted(self._files())
        total = sum(size for _, size, _ in files)
        while files and total > 0.9 * self.most:
            _, size, file = files.pop(0)
            file.unlink(missing_ok=True)
            with suppress(OSError):
                file.parent.rmdir()  # succeeds only if it is empty
            total -= size
        self._bytes = total

    def _files(self) -> list[tuple[int, int, Path]]:
        """(time of writing, bytes, path) of each."""
        files = []
        for file in self.folder.glob("*/*.jsonl.gz"):
            with suppress(OSError):
                facts = os.stat(file)
                files.append((facts.st_mtime_ns, facts.st_size, file))
        return files

    def _file(self, conversation: str, message: int) -> Path:
        return self.folder / conversation / f"{message}.jsonl.gz"


def _values(line: bytes) -> Any:
    """The values of a line. Raises ValueError, also for a NaN, which the page could not read."""
    return json.loads(line, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not a number")


def _whole(events: list[Event]) -> list[Event]:
    """The events, if they are those of one answer, in order. Raises ValueError."""
    kinds = [NAMES[type(event)] for event in events]
    steps = kinds[1:-1] if kinds[-1:] == ["finished"] else kinds[1:]
    if kinds[:1] != ["prefilled"] or set(steps) - {"step"}:
        raise ValueError("the events are not those of one answer")
    return events
