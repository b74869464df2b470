"""Runner: runs requests on the model, in this process or in a worker process.

The page keeps the model in a worker process, so that decoding never competes with the page for the
interpreter and a crash of the model ends the worker, not the app. This module never imports torch;
worker.py does, in the process that holds the model.
"""

import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, Protocol

from medusa_chat.checkpoints.chat_template import renderer
from medusa_chat.clean_stream import clean_output
from medusa_chat.decoding.events import Prefilled
from medusa_chat.errors import LoadStopped, MedusaChatError
from medusa_chat.messages import BEFORE_READING, LoadPhase, LoadRequest, Request, V
from medusa_chat.runtime.requests import End, Reply, Stop

if TYPE_CHECKING:
    from medusa_chat.runtime.worker import Worker

# Seconds between a stop and killing the worker, which may be inside one long call: in a load that
# still looks for its files (killing it loses the earlier model); in a load that reads them; in the
# prefill (one chunk may take a large model on a CPU this long); and in all other requests.
PATIENCE = {"find": 3.0, "read": 1.0, "prompt": 60.0, "answer": 10.0}
PR_SET_PDEATHSIG = 1
FIRST = 0.2  # seconds that a new worker waits for its first request before it imports anything
WORKER = "medusa_chat.runtime.worker"  # it imports torch and transformers


class WorkerGone(MedusaChatError):
    """The worker process has ended."""


class Runner(Protocol):
    """The process that holds the model.

    run: one request at a time; closing the iterator stops it. stop: from any thread; an answer
    then ends with reason "cancelled", a load raises LoadStopped. on_gone: called, from any thread,
    when the worker process exits unexpectedly. gone: why it exited, None while it runs.
    process_memory: bytes of main memory that it holds; None in this process, or if unknown.
    """

    on_gone: Callable[[], None] | None

    def run(self, request: Request[V]) -> Generator[V, None, None]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def gone(self) -> WorkerGone | None: ...
    def process_memory(self) -> int | None: ...


class InProcess:
    """A Worker in this process, for `generate`, `chat`, `bench` and tests."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._first: LoadRequest | None = None  # known while the packages are imported

    @cached_property
    def worker(self) -> "Worker":
        return prepared(self._first)

    def run(self, request: Request[V]) -> Generator[V, None, None]:
        self._stop.clear()
        self._first = request if isinstance(request, LoadRequest) else None
        yield from self.worker.handle(request, self._stop.is_set)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        vars(self).pop("worker", None)  # and the model with it

    def gone(self) -> WorkerGone | None:
        return None

    def process_memory(self) -> int | None:
        return None


@dataclass(eq=False)
class Running:
    """The running request. stage: a key of PATIENCE. is_stopping: whether it was asked to stop.
    is_killed: whether its process was killed."""

    stage: str
    is_stopping: bool = False
    is_killed: bool = False


class WorkerProcess:
    """A worker process, started at once; after it has ended, the next load starts another."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._sending = threading.Lock()  # a message may take more than one write
        self._is_closed = False
        self._running: Running | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        pipe, workers_end = context.Pipe()
        process = context.Process(
            target=serve, args=(workers_end,), daemon=True, name="medusa-chat-worker"
        )
        process.start()
        workers_end.close()
        with self._sending:
            self._pipe, self._process = pipe, process
            if self._is_closed:
                process.kill()
        threading.Thread(target=self._watch, args=(process,), daemon=True).start()

    def _watch(self, process: BaseProcess) -> None:
        """Wait for the process to exit; report it, unless it was closed or replaced."""
        wait([process.sentinel])
        if process is self._process and not self._is_closed and self.on_gone is not None:
            self.on_gone()

    def run(self, request: Request[V]) -> Generator[V, None, None]:
        """The results of a request. A load starts a new process where the last one has ended; a
        request that ignores a stop for too long ends with its process."""
        if isinstance(request, LoadRequest) and self.gone() and not self._is_closed:
            self._start()
        first = {LoadRequest: "find", Reply: "prompt"}
        self._running = running = Running(first.get(type(request), "answer"))
        try:
            for value in self._exchange(request):
                if isinstance(value, LoadPhase):
                    running.stage = "find" if value.name in BEFORE_READING else "read"
                elif isinstance(value, Prefilled):
                    running.stage = "answer"
                yield value
        except WorkerGone:
            if not running.is_killed:
                raise
            if not isinstance(request, LoadRequest):
                raise WorkerGone("the model did not stop, so its process was killed") from None
            self._start()
            error = LoadStopped(f"loading {request.checkpoint} was stopped: no model is loaded")
            error.is_model_lost = True
            raise error from None
        finally:
            self._running = None

    def _exchange(self, request: Request[Any]) -> Iterator[Any]:
        """Send a request and yield its results; raises the worker's error."""
        is_over = False
        try:
            self._send(request)
            while not isinstance(message := self._pipe.recv(), End):
                yield from message.values
            is_over = True
        except (EOFError, OSError) as error:
            is_over = True
            wait([self._process.sentinel], 1)
            raise _worker_gone(self._process) from error
        finally:
            if not is_over:  # closed early: none of its results may reach the next request
                self._drain()
        if message.is_last:
            wait([self._process.sentinel], 5)
            raise WorkerGone(str(message.error))
        if message.error is not None:
            raise message.error

    def _drain(self) -> None:
        """Stop the current request and discard the rest of its results."""
        self.stop()
        with suppress(EOFError, OSError):  # the worker has exited
            while not isinstance(self._pipe.recv(), End):
                pass

    def _send(self, message: Request[Any] | Stop) -> None:
        with self._sending:
            self._pipe.send(message)

    def stop(self) -> None:
        try:
            self._send(Stop())
        except (OSError, ValueError):
            return  # the worker has exited: nothing is left to stop
        running = self._running
        if running is not None and not running.is_stopping:
            running.is_stopping = True
            after = PATIENCE[running.stage]
            timer = threading.Timer(after, self._kill, (running, self._process))
            timer.daemon = True
            timer.start()

    def _kill(self, running: Running, process: BaseProcess) -> None:
        """Kill the process, if the request that was asked to stop still runs in it."""
        if running is self._running:
            running.is_killed = True
            process.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid

    def gone(self) -> WorkerGone | None:
        process = self._process
        return _worker_gone(process) if wait([process.sentinel], 0) else None

    def process_memory(self) -> int | None:
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


def _worker_gone(process: BaseProcess) -> WorkerGone:
    """The error that says how a process exited. Its exit code may be None for a moment."""
    end = "without an exit code"
    for _ in range(50):
        code = process.exitcode
        if code is not None:
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            break
        time.sleep(0.01)
    return WorkerGone(f"the model's process exited unexpectedly ({end})")


def serve(pipe: Connection) -> None:
    """The worker process: answer requests from the pipe (worker.serve_requests) until the app
    exits, the device fails, or Ctrl-C ends both."""
    end_with_parent()
    clean_output()  # libraries print strings from files of strangers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with suppress(KeyboardInterrupt):
        first = _sent_already(pipe)
        worker = prepared(first if isinstance(first, LoadRequest) else None, leaves_core=True)
        from medusa_chat.runtime.worker import serve_requests

        serve_requests(pipe, worker, first)


def _sent_already(pipe: Connection) -> Any:
    """The first request, usually a load; None where none is sent yet, or the app has exited."""
    with suppress(EOFError, OSError):
        return pipe.recv() if pipe.poll(FIRST) else None
    return None


def prepared(first: LoadRequest | None, leaves_core: bool = False) -> "Worker":
    """A worker, whose packages are imported. first: a load that will follow, for which weights are
    packed meanwhile; leaves_core: whether a page, and usually its browser, run beside."""
    packing = None
    with preparing():
        if WORKER not in sys.modules:
            from medusa_chat.checkpoints import devices  # torch, without transformers
            from medusa_chat.checkpoints.packing import begun

            if leaves_core:
                devices.leave_one_core()
            packing = begun(first) if first is not None else None
        from medusa_chat.runtime.worker import Worker

    return Worker(packing)


@contextmanager
def preparing() -> Iterator[None]:
    """While the packages of a model are imported, the process of chat templates starts beside, and
    no garbage is collected: imports leave none, and looking for it takes a quarter of their time.
    Modules live to the end, so that later collections, as of each load, leave them out."""
    with suppress(OSError):  # the first conversation will report it
        renderer().start()
    if WORKER in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()


def end_with_parent() -> None:
    """End this process when its parent ends, even if that is killed. On Linux the kernel does this
    inside any call; elsewhere a thread does, as soon as it is scheduled."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return  # not started by multiprocessing
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
