"""ModelLifecycle: the model of a session, from its load to its end.

How it is loaded, what the page shows of it, what is left after a load that failed, and whether it
is loaded again when its process ended by itself."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

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

MAX_CRASHES = 3  # of the worker in a row: then restarting is left to the user
NO_MODEL = ("empty", "failed")
STABLE_SECONDS = 60.0  # a model that was ready for so long ends the row
REMEDY = (
    "Send a message to try again; if it ends again, choose a smaller model or --max-context, "
    "or close other programs."
)


@dataclass(frozen=True)
class ModelState:
    """What the page shows of the model. message: why it "failed" and what to do; why it is
    "loading" when the worker's end is the reason; while "ready" or "empty", why the last load did
    not bring another one. done, total, rate, note: of a phase that has them, as in LoadPhase.
    learnt: what the last answer's budget knows, None before one."""

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
    """The model behind a runner. One thread at a time runs requests; any may read.

    state: what the page shows. requested: the load that was asked for last. loaded: the load that
    succeeded last. memory: as it was measured last.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.state = ModelState()
        self.requested: LoadRequest | None = None
        self.loaded: LoadRequest | None = None
        self.memory: DeviceMemory | None = None
        self._present: tuple[LoadRequest, ModelInfo] | None = None  # the model in the worker
        self._abandoned: LoadRequest | None = None  # a load that ended the worker too often
        self._crashes = 0  # of the worker in a row
        self._ready_at = 0.0

    def run(self, request: Request[V]) -> Iterator[V]:
        """Run a request in this thread, and follow what it changes of the model."""
        match request:
            case LoadRequest():
                return self._load(request)
            case MeasureMemory():
                return self._measure_memory(request)
            case Reply():
                return self._answer(request)
        return self.runner.run(request)

    def require_ready(self) -> None:
        """Raises ModelError, with why, where no model is ready."""
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
        except Exception:  # no such device here: a load will say so
            self.memory = None

    def restore(self, error: MedusaChatError) -> None:
        """Go back to the model before a load that was refused or stopped, if it is still there."""
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
        """Note that a load ended in an unexpected error: no model is there."""
        self._present = None
        self.state = ModelState("failed", message=why)

    def load_after_crash(self, error: WorkerGone) -> LoadRequest | None:
        """What to load again, the worker being gone; None where that cannot help."""
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

    def take_lost(self) -> LoadRequest | None:
        """A load for one attempt more: one that was given up, or of a model that was here and is
        no more; None where there is none."""
        request, self._abandoned = self._abandoned, None
        if request is None and self.state.status in NO_MODEL and self.requested == self.loaded:
            request = self.requested
        if request is not None:
            self._crashes = MAX_CRASHES - 1
            self.state = ModelState("loading", "start")
        return request

    def reset_crashes(self) -> None:
        """The worker's next end counts as the first of a row."""
        self._crashes = 0
