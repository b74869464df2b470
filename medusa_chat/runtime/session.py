"""Session: the one door of every front end to a model, and the thread that serves it."""

import logging
import os
import threading
from typing import Any

from medusa_chat.decoding.events import Finished, Stats
from medusa_chat.errors import LoadStopped, MedusaChatError
from medusa_chat.messages import LoadRequest, Request, V
from medusa_chat.runtime.model_lifecycle import NO_MODEL, ModelLifecycle, ModelState
from medusa_chat.runtime.requests import MeasureMemory, Queue, Reply, Switch, Ticket, Tune
from medusa_chat.runtime.runner import Runner, WorkerGone

LOADS = LoadRequest | Switch
NO_STATS = Stats(0, 0, None, 0.0, 0.0, None)


class Session:
    """One model and the requests to it, first come first served."""

    def __init__(self, runner: Runner, tunes: bool = False) -> None:
        """tunes: whether the model's steps are timed once after a load, when nobody asks."""
        self.runner = runner
        self.lifecycle = ModelLifecycle(runner)
        self._queue = Queue()
        self._thread = JobThread(self._queue, self.lifecycle, tunes)
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


IDLE_SECONDS = 2.0  # without a request, before the model's steps are timed
PATIENCE = 4.0  # seconds that a request waits at most for the timing that follows a load on a CPU
OUT_OF_MEMORY = (
    "most likely out of memory: choose int8 or nf4, a smaller context or a smaller model"
)
STOPPED = "stopped: the previous model stays loaded"
NONE_LEFT = "loading was stopped: no model is loaded"


class JobThread:
    """Started by the first ticket. Where a request fails its ticket says why; the next one runs."""

    def __init__(self, queue: Queue, lifecycle: ModelLifecycle, tunes: bool) -> None:
        """tunes: whether steps are timed after a load: on a CPU at once, else when nobody asks."""
        self._queue, self._lifecycle, self._runner = queue, lifecycle, lifecycle.runner
        self._tunes = tunes
        self._patience: float | None = None  # seconds that a request waits for the timing that runs
        self._must_check_worker = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Run what waits in the queue, whose lock is held: timing that nobody asked for ends."""
        self._end_tuning()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

    def _end_tuning(self) -> None:
        """Stop the timing that runs when a request has waited for it long enough."""
        if self._patience is not None:
            later = threading.Timer(self._patience, self._stop_tuning)
            later.daemon = True
            later.start()

    def _stop_tuning(self) -> None:
        with self._queue.changed:
            if self._patience is not None:
                self._runner.stop()

    def check_worker(self) -> None:
        """Let the thread see whether the worker is gone; returns at once. From any thread."""
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
                self._patience = 0.0 if ticket is None else None
            if ticket is None:
                self._tune_unasked()
            else:
                self._run(ticket)
            self._queue.release()

    def _wait(self) -> None:
        """Until there is something to do, or the time to tune."""
        while not (self._queue or self._must_check_worker or self._queue.is_closed):
            if not self._queue.changed.wait(IDLE_SECONDS if self._wants_tuning() else None):
                return

    def _replace_dead_worker(self) -> None:
        """Load the model again where the worker ended while it was idle."""
        self._must_check_worker = False
        error = self._runner.gone()
        if error is not None and self._lifecycle.state.status == "ready":
            self._load_again(error)

    def _load_again(self, error: WorkerGone) -> None:
        """Queue the load of the model before all that waits, unless that cannot help."""
        with self._queue.changed:
            again = None if self._queue.is_closed else self._lifecycle.load_after_crash(error)
            if again is not None:
                self._queue.put(Ticket(again), is_next=True)

    def _run(self, ticket: Ticket[Any]) -> None:
        match ticket.request:
            case LoadRequest():
                self._load(ticket)
                self._tune_at_once()
            case Switch(load):
                self._switch(ticket, load)
                self._tune_at_once()
            case _:
                self._ask(ticket)

    def _collect(self, ticket: Ticket[Any], request: Request[Any]) -> None:
        """Run a request, its values into the ticket's trace."""
        for value in self._lifecycle.run(request):
            ticket.add(value)
            if ticket.is_cancelled:
                self._runner.stop()

    def _ask(self, ticket: Ticket[Any]) -> None:
        """Ask something of the model that is there; an answer waits until a lost one is back."""
        is_reply = isinstance(ticket.request, Reply)
        if is_reply and self._puts_load_before(ticket):
            return
        try:
            if not isinstance(ticket.request, MeasureMemory):
                self._lifecycle.require_ready()
            self._collect(ticket, ticket.request)
        except Exception as error:  # shown on the page: the next ticket still runs
            ticket.error, ticket.cause = _sentence(error), error
            if isinstance(error, WorkerGone):
                if is_reply:
                    self._lifecycle.reset_crashes()  # this answer ended it: the next is another
                self._load_again(error)
        finally:
            ticket.end()

    def _puts_load_before(self, ticket: Ticket[Any]) -> bool:
        """Whether a lost model is loaded first, once for each answer, which waits meanwhile: to
        stop the answer then does not stop the load."""
        if ticket.has_waited:
            self._lifecycle.reset_crashes()
            return False
        with self._queue.changed:
            is_wanted = not (ticket.is_cancelled or self._queue.is_closed)
            request = self._lifecycle.take_lost() if is_wanted else None
            if request is None:
                return False
            ticket.has_waited, ticket.state = True, "waiting"
            self._queue.put(ticket, is_next=True)
            self._queue.put(Ticket(request), is_next=True)
            return True

    def _load(self, ticket: Ticket[Any]) -> None:
        """Load a model; where that fails, the lifecycle's state says why."""
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

    def _switch(self, ticket: Ticket[Any], load: LoadRequest) -> None:
        """Load another model; where that leaves none, the one before it again."""
        lifecycle = self._lifecycle
        before = lifecycle.loaded
        lifecycle.reset_crashes()
        try:
            self._collect(ticket, load)
        except Exception as error:  # shown on the page: the app itself goes on
            gone = f"{error}, {OUT_OF_MEMORY}"
            said = gone if isinstance(error, WorkerGone) else _sentence(error)
            stopped = STOPPED if before or lifecycle.state.status == "ready" else NONE_LEFT
            ticket.error = stopped if ticket.is_cancelled else said
            if lifecycle.state.status != "ready":
                lifecycle.state = ModelState("failed", message=ticket.error)
        ticket.end()
        is_lost = lifecycle.state.status != "ready"
        if is_lost and before is not None and not self._queue.is_closed:
            self._load(Ticket(before))

    def _tune_at_once(self) -> None:
        """Time the steps of a model that was just loaded on a CPU, where drafts may cost more than
        they save: with one thread, untimed first answers had 0.7 of plain decoding's speed."""
        state = self._lifecycle.state
        if self._wants_tuning() and state.model is not None and state.model.device == "cpu":
            with self._queue.changed:
                self._patience = PATIENCE
                if self._queue:  # asked for during the load
                    self._end_tuning()
            self._tune_unasked()

    def _wants_tuning(self) -> bool:
        is_ready = self._lifecycle.state.status == "ready"
        return self._tunes and self._lifecycle.is_untuned and is_ready

    def _tune_unasked(self) -> None:
        """Time the steps; a ticket that comes stops it, and it begins anew later. A failure is only
        logged: the model works as before."""
        try:
            for _ in self._lifecycle.run(Tune(again=False)):
                pass
        except WorkerGone as error:
            self._load_again(error)
        except Exception as error:
            self._lifecycle.is_untuned = False
            logging.getLogger(__name__).warning("the steps could not be timed: %s", error)
        finally:
            with self._queue.changed:
                self._patience = None


def _sentence(error: Exception) -> str:
    if isinstance(error, WorkerGone):
        return f"{error}. It is being restarted; your conversation is kept: send again."
    if isinstance(error, MedusaChatError):
        return str(error)
    if os.environ.get("MEDUSA_CHAT_DEBUG"):
        raise error
    return f"unexpected {type(error).__name__}: {error}"
