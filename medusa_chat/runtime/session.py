"""Session: the one door of every front end to a model. One queue of tickets, append-only traces.

Behind it stands a runner (runner.py, worker_process.py). This module never imports torch.
"""

from typing import Any

from medusa_chat.decoding.events import Finished, Stats
from medusa_chat.errors import LoadStopped
from medusa_chat.messages import LoadRequest, Request, V
from medusa_chat.runtime.job_thread import STOPPED, JobThread
from medusa_chat.runtime.model_lifecycle import NO_MODEL, ModelLifecycle, ModelState
from medusa_chat.runtime.requests import MeasureMemory, Reply, Switch
from medusa_chat.runtime.runner import Runner
from medusa_chat.runtime.scheduler import Queue, Ticket

LOADS = LoadRequest | Switch
NO_STATS = Stats(0, 0, None, 0.0, 0.0, None)


class Session:
    """One model and the requests to it, first come first served."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.lifecycle = ModelLifecycle(runner)
        self._queue = Queue()
        self._thread = JobThread(self._queue, self.lifecycle)
        runner.on_gone = self._thread.check_worker

    @property
    def state(self) -> ModelState:
        """What the page shows of the model."""
        return self.lifecycle.state

    @property
    def is_closed(self) -> bool:
        """Whether nothing is answered any more."""
        return self._queue.is_closed

    def submit(self, request: Request[V], guest: str = "") -> Ticket[V]:
        """Queue a request for the session's own thread; returns at once. guest: who asks, where the
        owner does not; then raises UsageError (Queue.put)."""
        ticket = Ticket(request, guest)
        with self._queue.changed:
            if isinstance(request, LoadRequest):
                self._announce(request)
            self._queue.put(ticket)
            self._thread.wake()
        return ticket

    def position(self, ticket: Ticket[Any]) -> int:
        """How many requests come before this one; 0 when it runs or has ended."""
        return self._queue.position(ticket)

    def cancel(self, ticket: Ticket[Any]) -> None:
        """Give a request up: at once while it waits; an answer that runs ends at its next step, a
        load within seconds."""
        with self._queue.changed:
            ticket.is_cancelled = True
            if self._queue.remove(ticket):
                self._end_unstarted(ticket)
            elif ticket is self._queue.running and not ticket.done.is_set():
                self.runner.stop()

    def take_up(self, request: Request[V]) -> Ticket[V]:
        """The ticket of an equal request that runs already, else a new one."""
        with self._queue.changed:
            running = self._queue.running
            if running is not None and running.request == request and not running.is_cancelled:
                return running
            return self.submit(request)

    def leave(self, ticket: Ticket[Any]) -> None:
        """Give a request up while it waits. One that runs goes on, to be taken up: it may be in one
        long call, and to stop it would end the model's process."""
        with self._queue.changed:
            if ticket is not self._queue.running:
                self.cancel(ticket)

    def load_again(self) -> None:
        """Load what was asked for last where no model is there, or on its way; returns at once."""
        with self._queue.changed:
            is_coming = self._is_loading or self._queue.waiting(LOADS)
            if self.state.status in NO_MODEL and not is_coming:
                self.submit(self.lifecycle.requested or LoadRequest())

    def measure_memory(self) -> None:
        """Have the lifecycle's memory measured again when the model is free; returns at once."""
        with self._queue.changed:
            if not self._queue.waiting(MeasureMemory):
                load = self.lifecycle.loaded or self.lifecycle.requested
                self.submit(MeasureMemory(load.device if load else "auto"))

    def close(self) -> None:
        """End the session's thread and the runner."""
        self._queue.close("the app was closed")
        self.runner.close()

    def _announce(self, request: LoadRequest) -> None:
        """Show a load before it begins, unless something else comes first."""
        self.lifecycle.requested = self.lifecycle.requested or request
        if not self._queue.is_busy and not self._queue:
            self.lifecycle.state = ModelState("loading", "start")

    def _end_unstarted(self, ticket: Ticket[Any]) -> None:
        """End a ticket that was taken out of the queue."""
        match ticket.request:
            case Reply():
                ticket.trace.append(Finished("cancelled", (), "", "", NO_STATS))
            case Switch():
                ticket.error = STOPPED
            case LoadRequest() if self.state.status == "loading" and not self._is_loading:
                self.lifecycle.restore(LoadStopped("loading was stopped before it began"))
        ticket.end()

    @property
    def _is_loading(self) -> bool:
        running = self._queue.running
        return running is not None and isinstance(running.request, LOADS)
