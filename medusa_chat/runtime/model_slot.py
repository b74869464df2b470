"""ModelSlot: the one model of a process, and its replacement by the next. Imports torch."""

from collections.abc import Callable, Iterator
from contextlib import closing, suppress

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.devices import choose_device
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import device_memory, release
from medusa_chat.errors import LoadStopped, ModelError
from medusa_chat.messages import BEFORE_READING, DeviceMemory, LoadPhase, LoadRequest


class ModelSlot:
    """loaded: the model, None before the first load and after one that failed while reading."""

    def __init__(self) -> None:
        self.loaded: LoadedModel | None = None

    def load(
        self, request: LoadRequest, should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[LoadPhase]:
        """Load phase by phase. The present model stays until the files of the next one are here,
        and is freed before they are read. Raises ModelError for a checkpoint that is refused, and
        LoadStopped at the first phase, or progress of a download, where should_stop() is true."""
        with suppress(OSError):  # the first conversation will say why
            renderer().start()  # now, so that it has begun before that one comes
        with closing(load(request)) as phases:
            for phase, model in phases:
                if phase.name not in BEFORE_READING:
                    self._replace(model)
                yield phase
                if phase.model is None and should_stop():
                    raise LoadStopped(self._stopped(request, phase))

    def require(self) -> LoadedModel:
        """The model. Raises ModelError without one."""
        if self.loaded is None:
            raise ModelError("no model is loaded: load one first")
        return self.loaded

    def measure_memory(self, device: str) -> DeviceMemory:
        """What the next model may take of a device. Raises DeviceError."""
        held = self.loaded.info.memory_bytes if self.loaded else 0
        return device_memory(choose_device(device), held)

    def _replace(self, model: LoadedModel | None) -> None:
        before, self.loaded = self.loaded, model
        if before is not None and model is None:
            del before
            release()

    def _stopped(self, request: LoadRequest, phase: LoadPhase) -> str:
        kept = "; what was downloaded is kept" if phase.name == "download" else ""
        here = f"{self.loaded.info.name} stays loaded" if self.loaded else "no model is loaded"
        return f"loading {request.checkpoint} was stopped{kept}: {here}"
