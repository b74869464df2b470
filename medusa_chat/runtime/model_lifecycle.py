"""ModelLifecycle: the model of a session, from its load to its end.

It runs loads, keeps the state that the page shows, restores the earlier model after a failed load,
and decides whether to reload after a crash of the model's process."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from medusa_chat.decoding.events import Event, Finished, Learnt
from medusa_chat.errors import LoadStopped, MedusaChatError, ModelError
from medusa_chat.messages import (
    BEFORE_READING,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Request,
    V,
)
from medusa_chat.runtime.requests import MeasureMemory, Reply
from medusa_chat.runtime.runner import Runner, WorkerGone

MAX_CRASHES = 3  # of the worker in a row; then the user has to restart it
NO_MODEL = ("empty", "failed")
STABLE_SECONDS = 60.0  # a crash after this time with a ready model counts as the first again
REMEDY = (
    "Send a message to try again; if it crashes again, choose a smaller model or --max-context, "
    "or close other programs."
)


@dataclass(frozen=True)
class ModelState:
    """What the page shows of the model. message: for "failed" the reason and the remedy; for
    "loading" the crash that caused it, if any; for "ready" and "empty" why the last load brought no
    new model. done, total, rate, note: of the load's phase, as in LoadPhase. learnt: what the last
    answer's budget has learnt; None before the first answer."""

    status: Literal["empty", "loading", "ready", "failed"] = "empty"
    phase: str = ""
    message: str = ""
    model: ModelInfo | None = None
    done: int = 0
    total: int = 0
    rate: float = 0.0
    note: str = ""
    learnt: Learnt | None = None


class ModelLifecycle:
    """The model behind a runner. One thread at a time runs requests; any thread may read.

    state: what the page shows. requested: the last load requested. loaded: the last load that
    succeeded. memory: the last measurement. on_loaded: called with each load that was asked for
    and succeeded, and its model.
    """

    on_loaded: Callable[[LoadRequest, ModelInfo], None] | None = None

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.state = ModelState()
        self.requested: LoadRequest | None = None
        self.loaded: LoadRequest | None = None
        self.memory: DeviceMemory | None = None
        self._present: tuple[LoadRequest, ModelInfo] | None = None  # the model in the worker
        self._abandoned: LoadRequest | None = None  # a load that crashed the worker too often
        self._crashes = 0  # of the worker in a row
        self._ready_at = 0.0

    def run(self, request: Request[V]) -> Iterator[V]:
        """Run a request in this thread, and update the model's state from its results."""
        handlers: dict[type, Callable[[Any], Iterator[Any]]] = {
            LoadRequest: self._load,
            MeasureMemory: self._measure_memory,
            Reply: self._answer,
        }
        return handlers.get(type(request), self.runner.run)(request)

    def require_ready(self) -> None:
        """Raises ModelError with the reason if no model is ready."""
        if self.state.status != "ready":
            raise ModelError(self.state.message or "no model is loaded: load one first")

    def _load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        self.requested, self._abandoned = request, None
        why = self.state.message if self.state.status == "loading" else ""
        self.state = ModelState("loading", "restart" if why else "start", why)
        try:
            for phase in self.runner.run(request):
                self._follow(request, phase, why)
                yield phase
        except MedusaChatError as error:
            self.restore(error)
            raise

    def _follow(self, request: LoadRequest, phase: LoadPhase, why: str) -> None:
        if phase.model is not None:
            self._ready_at = time.monotonic()
            self._present = request, phase.model
            self.state = ModelState("ready", model=phase.model)
            self.loaded = request
            return
        if phase.name not in BEFORE_READING:
            self._present = None
        told = (phase.done, phase.total, phase.rate, phase.note)
        self.state = ModelState("loading", phase.name, why, None, *told)

    def _answer(self, request: Reply) -> Iterator[Event]:
        for event in self.runner.run(request):
            if isinstance(event, Finished) and event.learnt is not None:
                self.state = replace(self.state, learnt=event.learnt)
            yield event

    def _measure_memory(self, request: MeasureMemory) -> Iterator[DeviceMemory]:
        try:
            for memory in self.runner.run(request):
                self.memory = memory
                yield memory
        except WorkerGone:
            raise
        except Exception:  # no such device: a load will report it
            self.memory = None

    def tell_loaded(self) -> None:
        """Call `on_loaded`, where there is a model."""
        if self.on_loaded is not None and self._present is not None:
            self.on_loaded(*self._present)

    def restore(self, error: MedusaChatError) -> None:
        """Return to the earlier model, if it still exists, after a refused or stopped load."""
        if isinstance(error, WorkerGone) or getattr(error, "is_model_lost", False):
            self._present = None
        if self._present is not None:
            self.requested, model = self._present
            self.state = ModelState("ready", message=str(error), model=model)
        elif isinstance(error, LoadStopped):
            self.state = ModelState("empty", message=str(error))
        else:
            self.state = ModelState("failed", message=str(error))

    def fail(self, why: str) -> None:
        """Record that a load ended with an unexpected error and left no model."""
        self._present = None
        self.state = ModelState("failed", message=why)

    def load_after_crash(self, error: WorkerGone) -> LoadRequest | None:
        """The request to reload after a crash of the worker; None where a reload cannot help."""
        self._present = None
        if self.requested is None or self.state.status == "empty":
            return None
        if self.state.status == "ready" and time.monotonic() > self._ready_at + STABLE_SECONDS:
            self._crashes = 0
        self._crashes += 1
        if self._crashes < MAX_CRASHES:
            self.state = ModelState("loading", "restart", str(error))
            return self.requested
        self._crashes, self._abandoned = 0, self.requested
        self.state = ModelState("failed", message=f"{error}, repeatedly. {REMEDY}")
        return None

    def take_reload(self) -> LoadRequest | None:
        """The request for one more attempt to load: a load that was given up after crashes, or that
        of a model that was lost; None where there is none."""
        request, self._abandoned = self._abandoned, None
        if request is None and self.state.status in NO_MODEL and self.requested == self.loaded:
            request = self.requested
        if request is not None:
            self._crashes = MAX_CRASHES - 1
            self.state = ModelState("loading", "start")
        return request

    def reset_crashes(self) -> None:
        """The worker's next crash counts as the first in a row."""
        self._crashes = 0
