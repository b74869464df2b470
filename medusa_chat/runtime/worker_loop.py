"""serve(): the loop of the worker process. Requests come in over a pipe, values go out."""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import parent_process
from multiprocessing.connection import Connection, wait
from time import perf_counter
from typing import Any

from medusa_chat.clean_stream import clean_output
from medusa_chat.decoding.events import Step
from medusa_chat.errors import MedusaChatError, ModelError, first_line, is_panic
from medusa_chat.messages import Request

BATCH_SECONDS = 0.01
PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Stop:
    """Into the worker: end the request that runs. One that comes after its end does nothing."""


@dataclass(frozen=True)
class Values:
    """Out of the worker: what a request brought, in order."""

    values: list[Any]


@dataclass(frozen=True)
class End:
    """Out of the worker: the request has ended. error: why it was refused. is_last: the worker's
    process ends now, for its device takes no more work."""

    error: Exception | None = None
    is_last: bool = False


def serve(pipe: Connection) -> None:
    """Take a Request or Stop from the pipe, send Values and one End for each request, until the
    other side of the pipe is gone, the device is lost, or Ctrl-C ends the app."""
    end_with_parent()
    clean_output()  # packages warn of what stands in the files of strangers
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with suppress(KeyboardInterrupt):
        _import_heavy_packages()
        from medusa_chat.checkpoints import devices

        devices.leave_one_core()  # the page, and mostly its browser, run beside
        _serve(pipe)


def _serve(pipe: Connection) -> None:
    from medusa_chat.runtime.worker import Worker

    worker = Worker()
    with suppress(EOFError, OSError):  # the app is gone, and with it the reason to live
        while True:
            request = pipe.recv()
            if isinstance(request, Stop):
                continue
            end = _handled(worker, request, pipe)
            pipe.send(end)
            if end.is_last:
                return


def _handled(worker: Any, request: Request[Any], pipe: Connection) -> End:
    """Send what a request brings; how it ended. Raises OSError and EOFError for a broken pipe."""
    try:
        _send(pipe, worker.handle(request, _stop_asked(pipe)))
    except MedusaChatError as error:
        return End(error)
    except (OSError, EOFError):
        raise
    except Exception as error:  # told to the session, which shows it
        if is_sticky(error):
            return End(ModelError(f"the GPU reported an error ({first_line(error)})"), is_last=True)
        return End(RuntimeError(f"{type(error).__name__}: {error}"))
    except BaseException as error:
        if not is_panic(error):
            raise
        what = f"the tokenizer of this model fails at this text ({first_line(error)})"
        return End(ModelError(f"{what}: change the text, or use another checkpoint"))
    return End()


def is_sticky(error: Exception) -> bool:
    """Whether the error is the device's: a CUDA context that met one fails in all that follows,
    until its process has ended. Where Triton meets it first it is another one, and waiting for the
    device tells."""
    import torch

    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except torch.AcceleratorError:
        return True
    return isinstance(error, torch.AcceleratorError)


def _send(pipe: Connection, values: Iterator[Any]) -> None:
    """Send values as they come, but steps that follow each other within BATCH_SECONDS together:
    every message wakes the other process, and a small model makes a thousand steps a second."""
    held: list[Any] = []
    sent = 0.0
    try:
        for value in values:
            held.append(value)
            now = perf_counter()
            if now - sent >= BATCH_SECONDS or not isinstance(value, Step):
                pipe.send(Values(held))
                held, sent = [], now
    finally:
        if held:
            pipe.send(Values(held))


def _stop_asked(pipe: Connection) -> Callable[[], bool]:
    """Whether a Stop has arrived since the request began."""

    def asked() -> bool:
        while pipe.poll():
            if isinstance(pipe.recv(), Stop):
                return True
        return False

    return asked


def _import_heavy_packages() -> None:
    """Import what every load needs before the first one is asked for."""
    import torch  # noqa: F401
    import transformers  # noqa: F401


def end_with_parent() -> None:
    """End this process when the one that started it ends, also where that was killed. Linux does
    so by itself, in the middle of any call; elsewhere a thread must get its turn."""
    parent = parent_process()
    if parent is None:
        return  # no process of multiprocessing
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    sentinel = parent.sentinel

    def watch() -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="end with parent").start()
