"""Session: how every front end uses a model, and the thread that runs its requests."""

import os
import threading
from dataclasses import replace
from typing import Any

from medusa_chat.decoding.events import Event, Finished, Stats
from medusa_chat.errors import LoadStopped, MedusaChatError
from medusa_chat.messages import LoadRequest, Request, V
from medusa_chat.runtime.model_lifecycle import NO_MODEL, ModelLifecycle, ModelState
from medusa_chat.runtime.requests import MeasureMemory, Queue, Reply, Switch, Ticket
from medusa_chat.runtime.runner import Runner, WorkerGone

LOADS = LoadRequest | Switch
NO_STATS = Stats(0, 0, None, 0.0, 0.0, None)


class Session:
    """One model and the requests to it, first come first served. started_with: the load that the
    command line asked for: the device and the limits of every later one. watched: the newest answer
    that another program asked for, which the page may show; in memory until the next one."""

    def __init__(self, runner: Runner, started_with: LoadRequest | None = None) -> None:
        self.runner = runner
        self._started_with = started_with
        self.lifecycle = ModelLifecycle(runner)
        self.watched: Ticket[Event] | None = None
        self._queue = Queue()
        self._thread = JobThread(self._queue, self.lifecycle)
        runner.on_gone = self._thread.check_worker

    @property
    def state(self) -> ModelState:
        """What the page shows of the model."""
        return self.lifecycle.state

    @property
    def started_with(self) -> LoadRequest:
        """See above; the first load, where nothing else was said."""
        return self._started_with or self.lifecycle.requested or LoadRequest()

    @property
    def is_closed(self) -> bool:
        """Whether it accepts no more requests."""
        return self._queue.is_closed

    def submit(self, request: Request[V], guest: str = "") -> Ticket[V]:
        """Queue a request for the session's own thread; returns at once. guest: the guest who asks,
        empty for the owner. Raises UsageError for guests (see Queue.put)."""
        ticket = Ticket(request, guest)
        with self._queue.changed:
            if isinstance(request, LoadRequest):
                self._announce(request)
            elif isinstance(request, Switch) and self.state.status == "empty":
                self._announce(request.load)
            self._queue.put(ticket)
            self._thread.wake()
        return ticket

    def position(self, ticket: Ticket[Any]) -> int:
        """How many requests come before this one; 0 when it runs or has ended."""
        return self._queue.position(ticket)

    def has_waiting(self, kind: type[Request[Any]], guest: str = "") -> bool:
        """Whether a request of this kind waits, of the guest or of the owner."""
        return any(ticket.guest == guest for ticket in self._queue.waiting(kind))

    def cancel(self, ticket: Ticket[Any]) -> None:
        """Cancel a request: at once while it waits; a running answer stops at its next step, a load
        within seconds."""
        with self._queue.changed:
            ticket.is_cancelled = True
            if self._queue.remove(ticket):
                self._end_unstarted(ticket)
            elif ticket is self._queue.running and not ticket.done.is_set():
                self.runner.stop()

    def take_up(self, request: Request[V], guest: str = "") -> Ticket[V]:
        """The ticket of an equal request that is already running, else a new one (see submit)."""
        with self._queue.changed:
            running = self._queue.running
            if running is not None and running.request == request and not running.is_cancelled:
                return running
            return self.submit(request, guest)

    def leave(self, ticket: Ticket[Any]) -> None:
        """Cancel a request while it waits. A running one continues, for `take_up`: it may be inside
        one long call, and stopping that would kill the model's process."""
        with self._queue.changed:
            if ticket is not self._queue.running:
                self.cancel(ticket)

    def load_again(self) -> None:
        """Repeat the last load if there is no model and none is loading; returns at once."""
        with self._queue.changed:
            is_coming = self._is_loading or self._queue.waiting(LOADS)
            if self.state.status in NO_MODEL and not is_coming:
                self.submit(self.lifecycle.requested or LoadRequest())

    def measure_memory(self) -> None:
        """Measure the lifecycle's memory again when the model is idle; returns at once."""
        with self._queue.changed:
            if not self._queue.waiting(MeasureMemory):
                load = self.lifecycle.loaded or self.lifecycle.requested
                self.submit(MeasureMemory(load.device if load else "auto"))

    def close(self) -> None:
        """End the session's thread and the runner."""
        self._queue.close("the app was closed")
        self.runner.close()

    def _announce(self, request: LoadRequest) -> None:
        """Show a load before it begins, unless another request comes first."""
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


OUT_OF_MEMORY = "probably out of memory: choose int8 or nf4, a smaller context or a smaller model"
STOPPED = "stopped: the previous model stays loaded"
NONE_LEFT = "loading was stopped: no model is loaded"


class JobThread:
    """The thread that runs tickets. A failed request puts the reason in its ticket."""

    def __init__(self, queue: Queue, lifecycle: ModelLifecycle) -> None:
        self._queue, self._lifecycle, self._runner = queue, lifecycle, lifecycle.runner
        self._must_check_worker = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Start the thread if needed. The caller holds the queue's lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def check_worker(self) -> None:
        """Let the thread check whether the worker has exited; returns at once. For any thread."""
        with self._queue.changed:
            self._must_check_worker = True
            self._queue.changed.notify_all()

    def _work(self) -> None:
        while True:
            with self._queue.changed:
                self._wait()
                if self._queue.is_closed:
                    return
                if self._must_check_worker:
                    self._replace_dead_worker()
                    continue
                ticket = self._queue.next_ticket()
            if ticket is not None:
                self._run(ticket)
            self._queue.release()

    def _wait(self) -> None:
        """Wait until there is something to do."""
        while not (self._queue or self._must_check_worker or self._queue.is_closed):
            self._queue.changed.wait()

    def _replace_dead_worker(self) -> None:
        """Reload the model if the worker exited while idle."""
        self._must_check_worker = False
        error = self._runner.gone()
        if error is not None and self._lifecycle.state.status == "ready":
            self._load_again(error)

    def _load_again(self, error: WorkerGone) -> None:
        """Queue a reload of the model before all waiting tickets, unless that cannot help."""
        with self._queue.changed:
            again = None if self._queue.is_closed else self._lifecycle.load_after_crash(error)
            if again is not None:
                self._queue.put(Ticket(again), is_next=True)

    def _run(self, ticket: Ticket[Any]) -> None:
        match ticket.request:
            case LoadRequest():
                self._load(ticket)
            case Switch():
                self._switch(ticket, ticket.request)
            case _:
                return self._ask(ticket)
        if not ticket.error:
            self._lifecycle.tell_loaded()

    def _collect(self, ticket: Ticket[Any], request: Request[Any]) -> None:
        """Run a request and append its values to the ticket's trace."""
        for value in self._lifecycle.run(request):
            ticket.add(value)
            if ticket.is_cancelled:
                self._runner.stop()

    def _ask(self, ticket: Ticket[Any]) -> None:
        """Run a request on the model; an answer first waits for the reload of a lost one."""
        is_reply = isinstance(ticket.request, Reply)
        if is_reply and self._puts_load_before(ticket):
            return
        try:
            if not isinstance(ticket.request, MeasureMemory):
                self._lifecycle.require_ready()
            self._collect(ticket, ticket.request)
        except Exception as error:  # shown on the page; the next ticket still runs
            ticket.error, ticket.cause = _sentence(error), error
            if isinstance(error, WorkerGone):
                if is_reply:
                    self._lifecycle.reset_crashes()  # the next answer is a new attempt
                self._load_again(error)
        finally:
            ticket.end()

    def _puts_load_before(self, ticket: Ticket[Any]) -> bool:
        """Whether a lost model is reloaded before this answer, at most once for each answer.
        Stopping the waiting answer does not stop the load."""
        if ticket.has_waited:
            self._lifecycle.reset_crashes()
            return False
        with self._queue.changed:
            is_wanted = not (ticket.is_cancelled or self._queue.is_closed)
            request = self._lifecycle.take_reload() if is_wanted else None
            if request is None:
                return False
            ticket.has_waited, ticket.state = True, "waiting"
            self._queue.put(ticket, is_next=True)
            self._queue.put(Ticket(request), is_next=True)
            return True

    def _load(self, ticket: Ticket[Any]) -> None:
        """Load a model; if that fails, the lifecycle's state has the reason."""
        try:
            self._collect(ticket, ticket.request)
        except Exception as error:  # shown on the page: the app itself goes on
            ticket.error = _sentence(error)
            if isinstance(error, WorkerGone):
                self._load_again(error)
            elif not isinstance(error, MedusaChatError):
                self._lifecycle.fail(ticket.error)
        finally:
            ticket.end()

    def _switch(self, ticket: Ticket[Any], switch: Switch) -> None:
        """Load another model; if that leaves none, load what was there, or instead of it."""
        lifecycle = self._lifecycle
        before = lifecycle.loaded
        lifecycle.reset_crashes()
        try:
            self._collect(ticket, switch.load)
        except Exception as error:  # shown on the page: the app itself goes on
            ticket.cause = error
            gone = f"{error}, {OUT_OF_MEMORY}"
            said = gone if isinstance(error, WorkerGone) else _sentence(error)
            is_left = lifecycle.loaded is not None or lifecycle.state.status == "ready"
            stopped = STOPPED if is_left else NONE_LEFT
            ticket.error = stopped if ticket.is_cancelled else said
            if lifecycle.state.status != "ready":
                lifecycle.state = ModelState("failed", message=ticket.error)
        ticket.end()
        is_lost, why = lifecycle.state.status != "ready" and not self._queue.is_closed, switch.why
        if is_lost and before is not None:
            self._load(Ticket(before))
        elif is_lost and switch.otherwise is not None and not ticket.is_cancelled:
            why = f"{switch.load.checkpoint}: {ticket.error}; "
            why += f"{switch.otherwise.checkpoint} is loaded instead"
            lifecycle.state = ModelState("loading", "start", why)
            self._load(Ticket(switch.otherwise))
        if why and lifecycle.state.status == "ready":
            lifecycle.state = replace(lifecycle.state, message=why)


def _sentence(error: Exception) -> str:
    if isinstance(error, WorkerGone):
        return f"{error}. It is being restarted; your conversation is kept: send the message again."
    if isinstance(error, MedusaChatError):
        return str(error)
    if os.environ.get("MEDUSA_CHAT_DEBUG"):
        raise error
    return f"unexpected {type(error).__name__}: {error}"
