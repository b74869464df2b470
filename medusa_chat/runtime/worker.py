"""Worker: holds the model and runs requests on it. Imports torch."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
import transformers  # noqa: F401  # imported before the first load asks for it
from torch import Tensor

from medusa_chat.checkpoints.devices import choose_device, refuse_out_of_memory, release
from medusa_chat.checkpoints.kernel_trial import machine_memory
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.packing import Packing
from medusa_chat.decoding.events import Step
from medusa_chat.errors import LoadStopped, MedusaChatError, ModelError, first_line, is_panic
from medusa_chat.messages import (
    BEFORE_READING,
    CountRequest,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    Peek,
    PeekRequest,
    Ranked,
    Request,
)
from medusa_chat.runtime.prompt import count
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import End, MeasureMemory, Reply, Stop, Values

BATCH_SECONDS = 0.01  # between two messages to the app


class Worker:
    """Runs requests on the process's only model. loaded: None before the first load, and after a
    load that failed while reading. packing: what was begun for the first load."""

    def __init__(self, packing: Packing | None = None) -> None:
        self.loaded: LoadedModel | None = None
        self._packing = packing

    def handle(
        self, request: Request[Any], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[Any]:
        """The results of a request, one by one. should_stop is checked between results; closing the
        iterator stops at once. Raises MedusaChatError for a refused request."""
        match request:
            case LoadRequest():
                yield from self.load(request, should_stop)
            case Reply():
                yield from reply(self.require(), request, should_stop)
            case PeekRequest():
                yield peek(self.require(), request)
            case CountRequest(messages):
                yield count(self.require(), messages)
            case MeasureMemory(device):
                yield self.measure_memory(device)
            case _:
                raise TypeError(f"a worker cannot handle {type(request).__name__}")

    def load(self, request: LoadRequest, should_stop: Callable[[], bool]) -> Iterator[LoadPhase]:
        """Load a model, phase by phase. The current model is kept until the files of the next one
        are on disk, and freed before they are read. Raises ModelError for a refused checkpoint, and
        LoadStopped at the first phase or progress report at which should_stop() is true."""
        packing, self._packing = self._packing, None
        try:
            with closing(load(request, packing)) as phases:
                for phase, model in phases:
                    if phase.name not in BEFORE_READING:
                        self._replace(model)
                    yield phase
                    if phase.model is None and should_stop():
                        raise LoadStopped(self._stopped(request, phase))
        finally:
            if packing is not None:
                packing.stop()

    def require(self) -> LoadedModel:
        """The model. Raises ModelError without one."""
        if self.loaded is None:
            raise ModelError("no model is loaded: load one first")
        return self.loaded

    def measure_memory(self, device: str) -> DeviceMemory:
        """The memory that the next model may take on a device. Raises DeviceError."""
        held = self.loaded.info.memory_bytes if self.loaded else 0
        return machine_memory(choose_device(device), held)

    def _replace(self, model: LoadedModel | None) -> None:
        before, self.loaded = self.loaded, model
        if before is not None and model is None:
            del before
            release()

    def _stopped(self, request: LoadRequest, phase: LoadPhase) -> str:
        kept = "; what was downloaded is kept" if phase.name == "download" else ""
        current = f"{self.loaded.info.name} stays loaded" if self.loaded else "no model is loaded"
        return f"loading {request.checkpoint} was stopped{kept}: {current}"


def peek(loaded: LoadedModel, request: PeekRequest) -> Peek:
    """The most probable tokens after a text, by the backbone and by one of its heads."""
    with refuse_out_of_memory(lambda: "out of memory: try a shorter chat"):
        logits, head_logits = loaded.engine.peek(request.token_ids, request.path, request.head)
    top, asked = _ranked(loaded, logits, request.temperature or 1.0, request)
    if head_logits is None:
        return Peek(top, (), asked, ())
    head_top, head_asked = _ranked(loaded, head_logits, 1.0, request)
    return Peek(top, head_top, asked, head_asked)


def _ranked(
    loaded: LoadedModel, logits: Tensor, temperature: float, request: PeekRequest
) -> tuple[tuple[Ranked, ...], tuple[Ranked, ...]]:
    """(the `top` most probable tokens, the requested tokens), with their probabilities."""
    shares = (logits.float() / temperature).softmax(-1).cpu()
    best = shares.topk(min(request.top, len(shares))).indices.tolist()

    def ranked(tokens: Sequence[int]) -> tuple[Ranked, ...]:
        return tuple(
            Ranked(t, loaded.texts(t), float(shares[t]), int((shares > shares[t]).sum()) + 1)
            for t in tokens
        )

    known = [token for token in request.tokens if 0 <= token < len(shares)]
    return ranked(best), ranked(known)


def serve_requests(pipe: Connection, worker: Worker, first: Request[Any] | Stop | None) -> None:
    """Read requests and Stops from the pipe, answer each request with Values and one End, until the
    app closes the pipe or the device fails. first: what was read already."""
    with suppress(EOFError, OSError):  # the app has exited
        while True:
            request, first = pipe.recv() if first is None else first, None
            if isinstance(request, Stop):
                continue  # for a request that has already ended
            end = _carry_out(pipe, worker, request)
            pipe.send(end)
            if end.is_last:
                return


def _carry_out(pipe: Connection, worker: Any, request: Request[Any]) -> End:
    """Send the results of a request -> how it ended. Raises OSError, EOFError on a broken pipe."""
    try:
        _send(pipe, worker.handle(request, lambda: _is_stop_sent(pipe)))
    except MedusaChatError as error:
        return End(error)
    except (OSError, EOFError):
        raise
    except Exception as error:  # the session shows it
        if is_sticky(error):
            return End(ModelError(f"the GPU reported an error ({first_line(error)})"), is_last=True)
        return End(RuntimeError(f"{type(error).__name__}: {error}"))
    except BaseException as error:
        if not is_panic(error):
            raise
        what = f"the tokenizer of this model fails on this text ({first_line(error)})"
        return End(ModelError(f"{what}: change the text, or use another checkpoint"))
    return End()


def is_sticky(error: Exception) -> bool:
    """Whether the device itself failed, so that every later call in this CUDA context fails too,
    until the process ends. Triton may raise its own error first, so the device is synchronised."""
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return isinstance(error, torch.AcceleratorError)


def _send(pipe: Connection, values: Iterator[Any]) -> None:
    """Send values as they come, but steps within BATCH_SECONDS in one message: each message wakes
    the app's process, and a small model makes a thousand steps a second."""
    batch: list[Any] = []
    sent = 0.0
    try:
        for value in values:
            batch.append(value)
            now = perf_counter()
            if now - sent >= BATCH_SECONDS or not isinstance(value, Step):
                pipe.send(Values(batch))
                batch, sent = [], now
    finally:
        if batch:
            pipe.send(Values(batch))


def _is_stop_sent(pipe: Connection) -> bool:
    """Whether a Stop has arrived since the request began."""
    while pipe.poll():
        if isinstance(pipe.recv(), Stop):
            return True
    return False
