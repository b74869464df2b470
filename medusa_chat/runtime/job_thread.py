"""JobThread: a session's own thread, which takes one ticket after the other from the queue."""

import os
import threading
from typing import Any

from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import LoadRequest, Request
from medusa_chat.runtime.model_lifecycle import ModelLifecycle, ModelState
from medusa_chat.runtime.requests import MeasureMemory, Reply, Switch
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.scheduler import Queue, Ticket

OUT_OF_MEMORY = (
    "most likely out of memory: choose int8 or nf4, a smaller context or a smaller model"
)
STOPPED = "stopped: the previous model stays loaded"
NONE_LEFT = "loading was stopped: no model is loaded"


class JobThread:
    """Started by the first ticket. Where a request fails its ticket says why; the next one runs."""

    def __init__(self, queue: Queue, lifecycle: ModelLifecycle) -> None:
        self._queue, self._lifecycle, self._runner = queue, lifecycle, lifecycle.runner
        self._must_check_worker = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Run what waits in the queue, whose lock is held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, daemon=True)
            self._thread.start()

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
            if ticket is not None:
                self._run(ticket)
            self._queue.release()

    def _wait(self) -> None:
        """Until there is something to do."""
        while not (self._queue or self._must_check_worker or self._queue.is_closed):
            self._queue.changed.wait()

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
            case Switch(load):
                self._switch(ticket, load)
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
            ticket.error = _sentence(error)
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


def _sentence(error: Exception) -> str:
    if isinstance(error, WorkerGone):
        return f"{error}. It is being restarted; your conversation is kept: send again."
    if isinstance(error, MedusaChatError):
        return str(error)
    if os.environ.get("MEDUSA_CHAT_DEBUG"):
        raise error
    return f"unexpected {type(error).__name__}: {error}"
