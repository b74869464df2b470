"""ModelLifecycle: the model of a session. How it is loaded, what the page shows of it, what is left
after a load that failed, and whether it comes back when its process ended by itself."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from medusa_chat.errors import LoadStopped, MedusaChatError, ModelError
from medusa_chat.messages import BEFORE_READING, DeviceMemory, LoadPhase, LoadRequest, ModelInfo
from medusa_chat.runtime.runner import Runner, WorkerGone
from medusa_chat.runtime.scheduler import ModelState

MAX_DEATHS = 3  # of the worker in a row: then restarting is left to the user
STEADY_SECONDS = 60.0  # a worker that was ready for so long has broken the row
REMEDY = (
    "Send a message to try again; if it ends again, choose a smaller model or --max-context, "
    "or close other programs."
)


class ModelLifecycle:
    """The model behind a runner. Not for two threads at once, but for what it says of itself.

    state: what the page shows. request: what was asked for last. loaded: what the model that is
    there was asked by. memory: as it was when somebody asked last. on_model: told of each model
    that is ready. is_untuned: whether its steps were not timed yet.
    """

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.state = ModelState()
        self.request: LoadRequest | None = None
        self.loaded: LoadRequest | None = None
        self.memory: DeviceMemory | None = None
        self.on_model: Callable[[ModelInfo], None] | None = None
        self.is_untuned = False
        self.is_load_stopped = False  # asked while one runs
        self._held: tuple[LoadRequest, ModelInfo] | None = None  # the model that is there
        self._lost: LoadRequest | None = None  # a load that was given up
        self._deaths = 0  # of the worker in a row
        self._ready_at = 0.0

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        """Load at once, in this thread; raises what the worker refuses."""
        self.request, self._lost = request, None
        why = self.state.message if self.state.status == "loading" else ""
        self.state = ModelState("loading", "restart" if why else "start", why)
        try:
            for phase in self.runner.load(request):
                self._follow(request, phase, why)
                yield phase
                if self.is_load_stopped:
                    self.runner.stop()  # it was asked before the runner had begun
        except MedusaChatError as error:
            self.fall_back(error)
            raise

    def _follow(self, request: LoadRequest, phase: LoadPhase, why: str) -> None:
        if phase.model is not None:
            self._ready_at = time.monotonic()
            self._held = request, phase.model
            self.state = ModelState("ready", model=phase.model)
            self.is_untuned = True
            if self.on_model is not None:
                self.on_model(phase.model)
            return
        if phase.name not in BEFORE_READING:
            self._held = None
        sizes = (phase.done, phase.total, phase.rate)
        self.state = ModelState("loading", phase.name, why, None, *sizes)

    def stop_load(self) -> None:
        """End the load that runs, or that is about to."""
        self.is_load_stopped = True
        self.runner.stop()

    def fall_back(self, error: MedusaChatError) -> None:
        """After a load that was refused or stopped: what was there before, if it still is."""
        if isinstance(error, WorkerGone) or getattr(error, "is_model_lost", False):
            self._held = None
        if self._held is not None:
            self.request, model = self._held
            self.state = ModelState("ready", message=str(error), model=model)
        elif isinstance(error, LoadStopped):
            self.request = None
            self.state = ModelState("empty", message=str(error))
        else:
            self.state = ModelState("failed", message=str(error))

    def fail(self, why: str) -> None:
        """After a load that ended in a way nobody foresaw: nothing is there."""
        self._held = None
        self.state = ModelState("failed", message=why)

    def require(self) -> None:
        """Raises ModelError, with why, where no model is ready."""
        if self.state.status != "ready":
            raise ModelError(self.state.message or "no model is loaded: load one first")

    def become(self, model: ModelInfo) -> None:
        """The same model with another auto tree."""
        if self.state.status == "ready":
            self.state = replace(self.state, model=model)
        if self._held is not None:
            self._held = self._held[0], model

    def weigh(self) -> None:
        """Look again how much memory there is. Raises WorkerGone."""
        request = self.loaded or self.request
        try:
            self.memory = self.runner.room_on(request.device if request else "auto")
        except WorkerGone:
            raise
        except Exception:  # no such device here: a load will say so
            self.memory = None

    def bring_back(self, error: WorkerGone) -> LoadRequest | None:
        """What to load again at once, the worker being gone; None where that cannot help."""
        self._held = None
        if self.request is None:
            return None
        if self.state.status == "ready" and time.monotonic() > self._ready_at + STEADY_SECONDS:
            self._deaths = 0
        self._deaths += 1
        if self._deaths < MAX_DEATHS:
            self.state = ModelState("loading", "restart", str(error))
            return self.request
        self._deaths, self._lost = 0, self.request
        self.state = ModelState("failed", message=f"{error}, again and again. {REMEDY}")
        return None

    def last_attempt(self) -> LoadRequest | None:
        """A load that was given up, to be tried once and no more; None where there is none."""
        request, self._lost = self._lost, None
        if request is not None:
            self._deaths = MAX_DEATHS - 1
        return request

    def forgive(self) -> None:
        """The worker's next end is the first of a row."""
        self._deaths = 0
