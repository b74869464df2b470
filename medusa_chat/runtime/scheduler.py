"""What waits in a session's queue, the queue, and what the page shows of the model."""

import itertools
import threading
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest, ModelInfo, Peek, PeekRequest, PersonalTree, Prompt


@dataclass(eq=False)
class Job:
    """One answer asked for: its place in the queue and its append-only trace."""

    prompt: Prompt
    settings: GenerationSettings
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    trace: list[Event] = field(default_factory=list)
    state: Literal["waiting", "running", "finished"] = "waiting"
    error: str = ""
    is_cancelled: bool = False
    asked_at: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None  # from asking to the first event, waiting included
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing comes any more."""
        self.state = "finished"
        self.done.set()


@dataclass(eq=False)
class Look:
    """A PeekRequest that waits its turn: once done, its peek, or else an error."""

    request: PeekRequest
    peek: Peek | None = None
    error: str = ""
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """The answer is there, or why there is none."""
        self.done.set()


@dataclass(eq=False)
class Switch:
    """Another model asked for while the app runs. Once done, it is loaded, or error says why not
    and the model before it is loaded again."""

    request: LoadRequest
    state: Literal["waiting", "running", "finished"] = "waiting"
    model: ModelInfo | None = None
    error: str = ""
    is_cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing of it comes any more."""
        self.state = "finished"
        self.done.set()


@dataclass(eq=False)
class Tune:
    """A change of the auto tree that waits its turn: step times measured anew, or another tree
    (None: the checkpoint's own) where is_measuring is false. Once done, the model it made, or
    else an error."""

    is_measuring: bool
    tree: PersonalTree | None = None
    state: Literal["waiting", "running", "finished"] = "waiting"
    model: ModelInfo | None = None
    error: str = ""
    done: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Nothing of it comes any more."""
        self.state = "finished"
        self.done.set()


class Weigh:
    """A turn in the queue for looking how much memory there is."""


Asked = Job | LoadRequest | Look | Switch | Tune | Weigh


class Queue:
    """What was asked for, first come first served; one of it runs at a time. For any thread.

    changed: its lock, to be held around what belongs together; notified of what comes.
    running: the one that runs, where somebody waits for it; is_loading: whether a load runs.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running: Job | Switch | Tune | None = None
        self.is_loading = False
        self.is_closed = False
        self._waiting: deque[Asked] = deque()

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def put(self, job: Asked, is_next: bool = False) -> None:
        """Behind all that wait, or before them."""
        with self.changed:
            (self._waiting.appendleft if is_next else self._waiting.append)(job)
            self.changed.notify_all()

    def take(self) -> Asked | None:
        """The next one, which runs from now on; None where nothing waits."""
        with self.changed:
            job = self._waiting.popleft() if self._waiting else None
            self.is_loading = isinstance(job, LoadRequest)
            self.running = job if isinstance(job, Job | Switch | Tune) else None
            if self.running is not None:
                self.running.state = "running"
            return job

    def done(self) -> None:
        """What was taken runs no more."""
        with self.changed:
            self.running, self.is_loading = None, False

    def remove(self, job: Job | Switch) -> bool:
        """Take out what waits; whether it did."""
        with self.changed:
            is_waiting = job in self._waiting
            if is_waiting:
                self._waiting.remove(job)
            return is_waiting

    def remove_all(self, kind: type[Asked]) -> bool:
        """Take out all of a kind that wait; whether there were any."""
        with self.changed:
            kept = [job for job in self._waiting if not isinstance(job, kind)]
            is_waiting = len(kept) < len(self._waiting)
            self._waiting = deque(kept)
            return is_waiting

    def has(self, kind: type[Asked]) -> bool:
        """Whether one of a kind waits."""
        with self.changed:
            return any(isinstance(job, kind) for job in self._waiting)

    def position(self, job: Job | Switch | Tune) -> int:
        """How many jobs come before this one; 0 when it runs or has ended."""
        with self.changed:
            if job not in self._waiting:
                return 0
            before = itertools.takewhile(lambda other: other is not job, self._waiting)
            waiting = sum(not isinstance(other, Look | Weigh) for other in before)  # take no time
            return waiting + (self.running is not None)

    def close(self, why: str) -> None:
        """End all that wait, in words for those who asked; what runs is left alone."""
        with self.changed:
            self.is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self.changed.notify_all()
        for job in waiting:
            if isinstance(job, Job | Look | Switch | Tune):
                job.error = why
                job.end()


@dataclass(frozen=True)
class ModelState:
    """What the page shows of the model. message: why it "failed" and what to do; why it is
    "loading" when the worker's end is the reason; while "ready" or "empty", why the last load did
    not bring another one. done, total, rate: of a download, as in LoadPhase."""

    status: Literal["empty", "loading", "ready", "failed"] = "empty"
    phase: str = ""
    message: str = ""
    model: ModelInfo | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
