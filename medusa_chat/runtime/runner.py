"""Runners: where the model lives. InProcess here (generate, chat, bench, tests), and child.Child
(the page). Never imports torch before a model is asked for."""

import threading
from collections.abc import Callable, Iterator
from typing import Protocol

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import (
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Peek,
    PeekRequest,
    PersonalTree,
    Prompt,
)
from medusa_chat.runtime.model_slot import ModelSlot


class Runner(Protocol):
    """Where the model lives. One call of load, reply, peek, room_on, tune or use_tree at a time;
    stop from any thread: an answer then ends with reason "cancelled", a load raises LoadStopped.

    on_gone is called, from any thread, when the model's process ends by itself; only a runner
    that calls it is asked `gone`: why the process is no more, None while it lives.
    """

    on_gone: Callable[[], None] | None

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]: ...
    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]: ...
    def peek(self, request: PeekRequest) -> Peek: ...
    def room_on(self, device: str) -> DeviceMemory: ...
    def tune(self, again: bool = False) -> Iterator[ModelInfo]: ...
    def use_tree(self, personal: PersonalTree | None) -> Iterator[ModelInfo]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def gone(self) -> "WorkerGone | None": ...
    def memory(self) -> int | None: ...


class WorkerGone(MedusaChatError):
    """The worker process ended by itself."""


class InProcess:
    """The model in this process."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._holder = ModelSlot()
        self._stop = threading.Event()

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        self._stop.clear()
        yield from self._holder.load(request, self._stop.is_set)

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        from medusa_chat.runtime.worker import reply

        self._stop.clear()
        yield from reply(self._holder.loaded, prompt, settings, self._stop.is_set)

    def peek(self, request: PeekRequest) -> Peek:
        from medusa_chat.runtime.worker import peek

        return peek(self._holder.loaded, request)

    def room_on(self, device: str) -> DeviceMemory:
        return self._holder.room_on(device)

    def tune(self, again: bool = False) -> Iterator[ModelInfo]:
        from medusa_chat.runtime.tuner import tuned

        self._stop.clear()
        yield from tuned(self._holder.loaded, self._stop.is_set, again)

    def use_tree(self, personal: PersonalTree | None) -> Iterator[ModelInfo]:
        from medusa_chat.runtime.tuner import with_tree

        yield from with_tree(self._holder.loaded, personal)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        self._holder.loaded = None

    def gone(self) -> WorkerGone | None:
        return None

    def memory(self) -> int | None:
        return None
