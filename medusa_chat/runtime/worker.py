"""Worker: holds the model of a process and does what is asked of it. Imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from typing import Any

from torch import Tensor

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.checkpoints.devices import choose_device
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.memory import device_memory, refuse_out_of_memory, release
from medusa_chat.errors import LoadStopped, ModelError
from medusa_chat.messages import (
    BEFORE_READING,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    Peek,
    PeekRequest,
    Ranked,
    Request,
)
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import MeasureMemory, Reply


class Worker:
    """The one place where a request becomes a call. loaded: the one model of the process, None
    before the first load and after one that failed while reading."""

    def __init__(self) -> None:
        self.loaded: LoadedModel | None = None

    def handle(
        self, request: Request[Any], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """What a request brings, value by value. should_stop is asked between values; closing the
        iterator stops at once. Raises MedusaChatError for what is refused."""
        match request:
            case LoadRequest():
                yield from self.load(request, should_stop)
            case Reply():
                yield from reply(self.require(), request, should_stop)
            case PeekRequest():
                yield peek(self.require(), request)
            case MeasureMemory(device):
                yield self.measure_memory(device)
            case _:
                raise TypeError(f"a worker cannot handle {type(request).__name__}")

    def load(self, request: LoadRequest, should_stop: Callable[[], bool]) -> Iterator[LoadPhase]:
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


def peek(loaded: LoadedModel, request: PeekRequest) -> Peek:
    """The most probable tokens after a text, from the backbone and from one of its heads."""
    with refuse_out_of_memory(lambda: "out of memory: try a shorter chat"):
        logits, drafted = loaded.engine.peek(request.token_ids, request.path, request.head)
    found = _ranked(loaded, logits, request.temperature or 1.0, request)
    at_head = ((), ()) if drafted is None else _ranked(loaded, drafted, 1.0, request)
    return Peek(found[0], at_head[0], found[1], at_head[1])


def _ranked(
    loaded: LoadedModel, logits: Tensor, temperature: float, request: PeekRequest
) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
    """(the first `top`, the tokens asked for), with their probabilities."""
    shares = (logits.float() / temperature).softmax(-1).cpu()
    best = shares.topk(min(request.top, len(shares))).indices.tolist()

    def places(tokens: Sequence[int]) -> tuple[Ranked, ...]:
        return tuple(
            Ranked(t, loaded.texts(t), float(shares[t]), int((shares > shares[t]).sum()) + 1)
            for t in tokens
        )

    known = [token for token in request.tokens if 0 <= token < len(shares)]
    return places(best), places(known)
