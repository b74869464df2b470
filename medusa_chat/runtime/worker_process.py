"""WorkerProcess: the runner that holds the model in a process of its own (worker_loop.py).

Torch lives there, so that the page never competes with decoding for the interpreter and a crash
of the model ends the worker, not the app. Never imports torch itself.
"""

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from medusa_chat.decoding.events import Prefilled
from medusa_chat.errors import LoadStopped
from medusa_chat.messages import BEFORE_READING, LoadPhase, LoadRequest, Request, V
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import WorkerGone
from medusa_chat.runtime.worker_loop import End, Stop, serve

# Seconds from a stop to the end of the process, which may be inside one long call: of a load that
# looks for its files, when the model loaded before would be lost with the process; of a load that
# reads them; of the reading of a prompt, a part of which takes a large model on a CPU so long; of
# anything else.
PATIENCE = {"find": 3.0, "read": 1.0, "prompt": 60.0, "answer": 10.0}


@dataclass(eq=False)
class Running:
    """The request that runs. stage: a key of PATIENCE, "" for what takes as long as it takes;
    is_stopping: whether its process will be ended if it goes on; is_ended: whether it was."""

    stage: str = ""
    is_stopping: bool = False
    is_ended: bool = False


class WorkerProcess:
    """A worker process, started at once; after its end a load starts a new one."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._sending = threading.Lock()  # a message may be more than one write
        self._is_closed = False
        self._running: Running | None = None
        self._start()

    def _start(self) -> None:
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

    def run(self, request: Request[V]) -> Iterator[V]:
        """The values of a request. A load begins in a new process where the last one has ended;
        what goes on too long after a stop ends with its process."""
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
            if not running.is_ended:
                raise
            if not isinstance(request, LoadRequest):
                raise WorkerGone("the model did not stop, so its process was ended") from None
            self._start()
            error = LoadStopped(f"loading {request.checkpoint} was stopped: no model is loaded")
            error.is_model_lost = True
            raise error from None
        finally:
            self._running = None

    def _exchange(self, request: Request[Any]) -> Iterator[Any]:
        """Send a request and yield what comes back; raises what the worker refused."""
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
            if not is_over:  # closed before its end: nothing of it may reach the next request
                self._drain()
        if message.is_last:
            wait([self._process.sentinel], 5)
            raise WorkerGone(str(message.error))
        if message.error is not None:
            raise message.error

    def _drain(self) -> None:
        """Stop what runs and drop the rest of it."""
        self.stop()
        try:
            while not isinstance(self._pipe.recv(), End):
                pass
        except (EOFError, OSError):
            return  # the worker is gone, and the rest with it

    def _send(self, message: Request[Any] | Stop) -> None:
        with self._sending:
            self._pipe.send(message)

    def stop(self) -> None:
        try:
            self._send(Stop())
        except (OSError, ValueError):
            return  # the worker is gone: nothing runs that could be stopped
        running = self._running
        if running is not None and running.stage and not running.is_stopping:
            running.is_stopping = True
            ending = self._end_process, (running, self._process)
            timer = threading.Timer(PATIENCE[running.stage], *ending)
            timer.daemon = True
            timer.start()

    def _end_process(self, running: Running, process: BaseProcess) -> None:
        """End the process of what still runs, some time after it was asked to stop."""
        if running is self._running:
            running.is_ended = True
            process.kill()

    @property
    def pid(self) -> int | None:
        """Process id of the worker."""
        return self._process.pid

    def gone(self) -> WorkerGone | None:
        process = self._process
        if not wait([process.sentinel], 0):
            return None
        return _worker_gone(process)

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
    """How a process ended. Its code is None for a moment while another thread reads it."""
    end = "without an exit code"
    for _ in range(50):
        code = process.exitcode
        if code is not None:
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            break
        time.sleep(0.01)
    return WorkerGone(f"the model's process ended ({end})")
