"""Child: the worker, a process of its own that holds the model (worker_process.py).

It holds torch, so that the page never competes with decoding for the interpreter and a crash of
the model ends the worker, not the app. Never imports torch itself.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from medusa_chat.decoding.events import Event
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import LoadStopped
from medusa_chat.messages import (
    BEFORE_READING,
    DeviceMemory,
    LoadPhase,
    LoadRequest,
    ModelInfo,
    Peek,
    PeekRequest,
    PersonalTree,
    Prompt,
)
from medusa_chat.runtime.runner import WorkerGone

# Seconds that a load may take to heed a stop before its process is ended: longer while a model
# loaded before would be lost with it, which is as long as the network has the word.
PATIENCE = {True: 3.0, False: 1.0}


@dataclass(eq=False)
class Load:
    """A load that runs: its phase; is_ended: whether its process was ended to stop it."""

    phase: str = "resolve"
    is_ended: bool = False


class Child:
    """The model in a process of its own, started at once; load starts a new one after its end."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._sending = threading.Lock()  # a message may be more than one write
        self._is_closed = False
        self._load: Load | None = None
        self._start()

    def _start(self) -> None:
        from medusa_chat.runtime.worker_process import serve

        context = multiprocessing.get_context("spawn")
        pipe, theirs = context.Pipe()
        process = context.Process(
            target=serve, args=(theirs,), daemon=True, name="medusa-chat-worker"
        )
        process.start()
        theirs.close()
        with self._sending:
            self._pipe, self._process = pipe, process
            if self._is_closed:
                process.kill()
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: BaseProcess) -> None:
        """Sleep until the process ends; say so, unless it was to end or has a successor."""
        wait([process.sentinel])
        if process is self._process and not self._is_closed and self.on_gone is not None:
            self.on_gone()

    def load(self, request: LoadRequest) -> Iterator[LoadPhase]:
        if self.gone() and not self._is_closed:
            self._start()
        self._load = load = Load()
        try:
            for phase in self._call("load", request):
                load.phase = phase.name
                yield phase
        except WorkerGone:
            if not load.is_ended:
                raise
            self._start()
            error = LoadStopped(f"loading {request.checkpoint} was stopped: no model is loaded")
            error.is_model_lost = True
            raise error from None
        finally:
            self._load = None

    def reply(self, prompt: Prompt, settings: GenerationSettings) -> Iterator[Event]:
        yield from self._call("reply", prompt, settings)

    def peek(self, request: PeekRequest) -> Peek:
        found: Peek = list(self._call("peek", request))[0]
        return found

    def room_on(self, device: str) -> DeviceMemory:
        found: DeviceMemory = list(self._call("memory", device))[0]
        return found

    def tune(self, again: bool = False) -> Iterator[ModelInfo]:
        """Measure; what the model then is, or nothing when it was stopped before the end."""
        yield from self._call("tune", again)

    def use_tree(self, personal: PersonalTree | None) -> Iterator[ModelInfo]:
        yield from self._call("use_tree", personal)

    def _call(self, *request: object) -> Iterator[Any]:
        """Send a request and yield what comes back; raises what the worker refused."""
        is_over = False
        try:
            self._send(request)
            while True:
                kind, value = self._pipe.recv()
                is_over = kind in ("end", "refused")
                if kind == "end":
                    return
                if kind == "refused":
                    raise value
                if kind == "events":
                    yield from value
                else:
                    yield value
        except (EOFError, OSError) as error:
            is_over = True
            wait([self._process.sentinel], 1)
            raise WorkerGone(f"the model's process ended ({_end_of(self._process)})") from error
        finally:
            if not is_over:  # closed before its end: nothing of it may reach the next request
                self._drain()

    def _drain(self) -> None:
        """Stop what runs and drop the rest of it."""
        self.stop()
        try:
            while self._pipe.recv()[0] not in ("end", "refused"):
                pass
        except (EOFError, OSError):
            return  # the worker is gone, and the rest with it

    def _send(self, message: object) -> None:
        with self._sending:
            self._pipe.send(message)

    def stop(self) -> None:
        try:
            self._send(("stop",))
        except (OSError, ValueError):
            return  # the worker is gone: nothing runs that could be stopped
        if (load := self._load) is not None:
            patience = PATIENCE[load.phase in BEFORE_READING]
            timer = threading.Timer(patience, self._end, (load, self._process))
            timer.daemon = True
            timer.start()

    def _end(self, load: "Load", process: BaseProcess) -> None:
        """End the process of a load that did not heed a stop: it is inside one long call."""
        if load is self._load:
            load.is_ended = True
            process.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid

    def gone(self) -> WorkerGone | None:
        process = self._process
        if not wait([process.sentinel], 0):
            return None
        return WorkerGone(f"the model's process ended ({_end_of(process)})")

    def memory(self) -> int | None:
        """Bytes of main memory the worker holds now; None where that cannot be read."""
        import psutil

        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.Error:
            return None

    def close(self) -> None:
        with self._sending:
            self._is_closed = True
            process = self._process
        process.kill()
        process.join(5)
        self._pipe.close()


def _end_of(process: BaseProcess) -> str:
    """How a process ended. Another thread may be reading the code just now: asked again."""
    for _ in range(50):
        code = process.exitcode
        if code is not None:
            return f"signal {-code}" if code < 0 else f"exit code {code}"
        time.sleep(0.01)
    return "without an exit code"
