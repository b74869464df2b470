"""The events of a training, and RunLog, the file in which the page reads them.

Events need no tensors: the command line writes them as JSON by field. The log has one a line; it
holds figures and names, never a text of the training data.
"""

import json
import os
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from medusa_chat import paths

TopShares = tuple[tuple[float, ...], ...]  # [head][n - 1]: how often the token is in the top n


@dataclass(frozen=True)
class Stage:
    """A stage of the work begins."""

    name: str


@dataclass(frozen=True)
class Note:
    """One line on what was decided or left out."""

    line: str


@dataclass(frozen=True)
class TrainStep:
    """One optimizer step is done.

    losses, top: per head; top[k][n - 1] is the share of labels within the first n predictions of
    head k, n from 1 to 5. labels: of the first head. lm_loss: the backbone's own loss in nats a
    token, where the backbone is trained as well.
    """

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    top: TopShares
    labels: int
    learning_rate: float
    lm_loss: float | None = None


@dataclass(frozen=True)
class Evaluated:
    """Losses and accuracies on the held-out examples after `step` steps, as in TrainStep."""

    step: int
    losses: tuple[float, ...]
    top: TopShares
    lm_loss: float | None = None


@dataclass(frozen=True)
class HiddenStates:
    """The backbone has run over `done` of `total` examples, with `tokens` tokens so far, and their
    hidden states are cached."""

    done: int
    total: int
    tokens: int


@dataclass(frozen=True)
class Written:
    """The output is on disk. bytes: its size; answers: the file of the backbone's answers."""

    folder: str
    bytes: int
    answers: str = ""


# ----------------------------------------------------------------------------------------- the log

MOST_RUNS = 10  # logs that are kept
MOST_BYTES = 8_000_000  # of a log that are read
STEP_SECONDS = 0.5  # between two steps that are written, at least, and
STEP_SHARE = 1 / 500  # of the time so far: the log of a run of days has some thousand lines


class RunLog:
    """The log of a training in this process, from its first event on: a request that is refused
    leaves none. Where the disk cannot be written, the training goes on without a log.

    can_stop: whether the page may ask the training to stop (`wants_stop`).
    """

    def __init__(self, output: Path, can_stop: bool = True) -> None:
        self.file = runs_folder() / f"{_next_number()}.jsonl"
        self.can_stop, self._is_stopped = can_stop, False
        self._began, self._told = time.monotonic(), float("-inf")
        started = datetime.now(UTC).isoformat(timespec="seconds")
        first = {"output": str(output), "pid": os.getpid(), "started": started}
        self._first = json.dumps({"event": "began", **first, "can_stop": can_stop})

    def tell(self, line: str, is_step: bool = False) -> None:
        """Append one event as JSON. Steps that follow one another fast are left out."""
        now = time.monotonic()
        if is_step and now < self._told + max(STEP_SECONDS, STEP_SHARE * (now - self._began)):
            return
        if is_step:
            self._told = now
        if self._first:
            _make_room(self.file.parent)
            self._write(self._first)
            self._first = ""
        self._write(line)

    def wants_stop(self) -> bool:
        """Whether the page has asked the training to stop."""
        return self.can_stop and self.file.with_suffix(".stop").exists()

    def stopped(self) -> None:
        """Record that the user stopped the training."""
        self._is_stopped = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._first:
            return
        reason = "done" if error is None else "failed"
        reason = "stopped" if self._is_stopped else reason
        message = " ".join(str(error).split())[:300] if error is not None else ""
        self._write(json.dumps({"event": "ended", "reason": reason, "message": message}))
        with suppress(OSError):
            self.file.with_suffix(".stop").unlink(missing_ok=True)

    def _write(self, line: str) -> None:
        with suppress(OSError), open(self.file, "a", encoding="utf-8") as file:
            file.write(line + "\n")


@dataclass(frozen=True)
class Run:
    """A training by its log. first: of its lines; events: the others, in order. stamp: the time of
    the last change of the file, in nanoseconds."""

    file: Path
    first: dict[str, Any]
    events: tuple[dict[str, Any], ...]
    stamp: int = 0

    @property
    def output(self) -> str:
        return str(self.first.get("output", ""))

    @property
    def started(self) -> str:
        """Date and time, UTC."""
        return str(self.first.get("started", ""))

    @property
    def can_stop(self) -> bool:
        """Whether the page may ask it to stop."""
        return self.first.get("can_stop") is True

    @property
    def ended(self) -> dict[str, Any] | None:
        """The last event, with reason and message; None while the training runs."""
        return next((event for event in self.events if event["event"] == "ended"), None)

    @property
    def is_running(self) -> bool:
        """Whether it has not ended and its process exists."""
        import psutil

        pid = self.first.get("pid")
        return self.ended is None and isinstance(pid, int) and bool(psutil.pid_exists(pid))

    def ask_to_stop(self) -> None:
        """Stop the training after its next step; --resume continues there. Raises OSError."""
        self.file.with_suffix(".stop").touch()


def runs_folder() -> Path:
    """The folder of the logs of this user's trainings."""
    return paths.state_dir() / "runs"


def _next_number() -> int:
    """The time; after the last log's number where the clock was set back."""
    kept = (int(file.stem) for file in runs_folder().glob("*.jsonl") if file.stem.isdigit())
    return max(time.time_ns(), max(kept, default=0) + 1)


def latest(last_seen: Run | None = None) -> Run | None:
    """The training that began last; None where no log can be read. last_seen: the last result,
    which is returned again while its file has not changed."""
    for file in sorted(runs_folder().glob("*.jsonl"), reverse=True):
        if last_seen is not None and last_seen.file == file and last_seen.stamp == _stamp(file):
            return last_seen
        if (run := read(file)) is not None:
            return run
    return None


def read(file: Path) -> Run | None:
    """Read one log. Damaged and incomplete lines are left out."""
    stamp = _stamp(file)
    try:
        with open(file, "rb") as stream:
            lines = stream.read(MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return None
    events = [event for event in map(_event, lines) if event is not None]
    if not events or events[0]["event"] != "began":
        return None
    return Run(file, events[0], tuple(events[1:]), stamp)


def _stamp(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_event = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if is_event else None


def _make_room(folder: Path) -> None:
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        for old in sorted(folder.glob("*.jsonl"), reverse=True)[MOST_RUNS - 1 :]:
            old.unlink(missing_ok=True)
            old.with_suffix(".stop").unlink(missing_ok=True)
