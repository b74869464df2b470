"""Requests to a model, and the queue that they wait in."""

import itertools
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import UnionType
from typing import Any, Generic, Literal

from medusa_chat.decoding.events import Event, Reading
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.messages import (
    CountRequest,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    PeekRequest,
    Prompt,
    Request,
    V,
)


@dataclass(frozen=True)
class Reply(Request[Event]):
    """Answer a conversation, or continue a raw text.

    drops_oldest: whether to leave out the oldest messages of a conversation that is too long for
    the context, instead of refusing it. continues: whether to continue a last message of the
    assistant, instead of beginning a new one. template_options: variables for the chat template.
    logprobs: the number of alternatives for each token's log probability; None for no logprobs.
    """

    prompt: Prompt
    settings: GenerationSettings
    drops_oldest: bool = False
    continues: bool = True
    template_options: Mapping[str, Any] = field(default_factory=dict)
    logprobs: int | None = None


@dataclass(frozen=True)
class MeasureMemory(Request[DeviceMemory]):
    """The memory that the next model may take on a device."""

    device: str = "auto"


@dataclass(frozen=True)
class Switch(Request[LoadPhase]):
    """Load another model, and if that leaves none, reload the earlier one; without one,
    `otherwise`. For sessions, which run the loads on their worker. why: what to tell with the model
    that is loaded, at the start."""

    load: LoadRequest
    otherwise: LoadRequest | None = None
    why: str = ""


MAX_GUESTS = 8  # waiting
ONE_ANSWER = "your earlier answer is not finished: wait for it, or stop it"
OTHERS_WAIT = "other guests are waiting: try again in a moment"
QUICK = PeekRequest | CountRequest | MeasureMemory  # so quick that they do not count as waiting


@dataclass(frozen=True)
class Stop:
    """To the worker: end the current request. Ignored if it has already ended."""


@dataclass(frozen=True)
class Values:
    """From the worker: the next results of the current request."""

    values: list[Any]


@dataclass(frozen=True)
class End:
    """From the worker: the request has ended. error: why it failed. is_last: the worker exits now,
    because its device accepts no more work."""

    error: Exception | None = None
    is_last: bool = False


@dataclass(eq=False)
class Ticket(Generic[V]):
    """One request in a session's queue, and its results so far. Any thread may read it.

    trace: the values so far, append-only. reading: progress of reading the prompt. error, cause:
    why the request failed, as text and as exception; set before `done`. has_waited: whether it has
    already waited for the reload of a lost model. guest: the guest who asks, empty for the owner.
    first_seconds: from the submission to the first value, including the wait.
    """

    request: Request[V]
    guest: str = ""
    trace: list[V] = field(default_factory=list)
    reading: Reading | None = None
    state: Literal["waiting", "running", "finished"] = "waiting"
    error: str = ""
    cause: Exception | None = None
    is_cancelled: bool = False
    has_waited: bool = False
    submitted_at: float = field(default_factory=time.monotonic)
    first_seconds: float | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def result(self) -> V | None:
        """The latest value; None before the first."""
        return self.trace[-1] if self.trace else None

    def add(self, value: V | Reading) -> None:
        """Append a value of the request to the trace."""
        if isinstance(value, Reading):
            self.reading = value
            return
        if not self.trace:
            self.first_seconds = time.monotonic() - self.submitted_at
        self.trace.append(value)

    def end(self) -> None:
        """Mark the request as ended: no value follows."""
        self.state = "finished"
        self.done.set()


class Queue:
    """Tickets in order of arrival, the owner's before those of guests; one runs at a time. Safe for
    any thread.

    changed: the lock, to be held around several calls that belong together; notified of changes.
    """

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running: Ticket[Any] | None = None
        self.is_closed = False
        self._waiting: deque[Ticket[Any]] = deque()

    def __len__(self) -> int:
        """The number of waiting tickets."""
        return len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether a request runs that others wait for; a load does not count (see ModelState)."""
        running = self.running
        if running is None or running.done.is_set():  # then it is released in a moment
            return False
        return not isinstance(running.request, QUICK | LoadRequest | Switch)

    def put(self, ticket: Ticket[Any], is_next: bool = False) -> None:
        """Append a ticket, or with is_next put it before all waiting ones. Raises UsageError if the
        guest already has an answer, or if too many of guests wait; quick ones are counted apart."""
        with self.changed:
            if ticket.guest and not is_next:
                self._check_guest(ticket)
            ahead = (not is_next and (ticket.guest or not other.guest) for other in self._waiting)
            self._waiting.insert(sum(1 for _ in itertools.takewhile(bool, ahead)), ticket)
            self.changed.notify_all()

    def _check_guest(self, ticket: Ticket[Any]) -> None:
        is_quick = isinstance(ticket.request, QUICK)
        like = [t for t in self._waiting if t.guest and isinstance(t.request, QUICK) == is_quick]
        if not is_quick:
            if any(t.guest == ticket.guest for t in (*self._running_answer(), *like)):
                raise UsageError(ONE_ANSWER)
        if len(like) >= MAX_GUESTS:
            raise UsageError(OTHERS_WAIT)

    def _running_answer(self) -> list[Ticket[Any]]:
        now = self.running
        is_answer = now is not None and not (isinstance(now.request, QUICK) or now.done.is_set())
        return [now] if now is not None and is_answer else []

    def next_ticket(self) -> Ticket[Any] | None:
        """Take the next ticket and mark it as running; None if none waits."""
        with self.changed:
            self.running = self._waiting.popleft() if self._waiting else None
            if self.running is not None:
                self.running.state = "running"
            return self.running

    def release(self) -> None:
        """Mark the running ticket as finished with."""
        with self.changed:
            self.running = None

    def remove(self, ticket: Ticket[Any]) -> bool:
        """Remove a waiting ticket -> whether it was waiting."""
        with self.changed:
            is_waiting = ticket in self._waiting
            if is_waiting:
                self._waiting.remove(ticket)
            return is_waiting

    def waiting(self, kind: type[Request[Any]] | UnionType) -> list[Ticket[Any]]:
        """The waiting tickets with requests of this kind."""
        with self.changed:
            return [ticket for ticket in self._waiting if isinstance(ticket.request, kind)]

    def position(self, ticket: Ticket[Any]) -> int:
        """How many requests come before this one; 0 when it runs or has ended."""
        with self.changed:
            if ticket not in self._waiting:
                return 0
            before = itertools.takewhile(lambda other: other is not ticket, self._waiting)
            return sum(not isinstance(t.request, QUICK) for t in before) + self.is_busy

    def close(self, why: str) -> None:
        """End all waiting tickets with an error; a running one is left alone."""
        with self.changed:
            self.is_closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self.changed.notify_all()
        for ticket in waiting:
            ticket.error = why
            ticket.end()
