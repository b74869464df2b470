"""Runner: where the model lives, as a session sees it.

In this process (InProcess: generate, chat, bench, tests) or in a worker process
(worker_process.py: the page)."""

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from medusa_chat.errors import MedusaChatError
from medusa_chat.messages import Request, V


class WorkerGone(MedusaChatError):
    """The worker process ended by itself."""


class Runner(Protocol):
    """Where the model lives.

    run: one request at a time; closing the iterator stops it. stop: from any thread; an answer
    then ends with reason "cancelled", a load raises LoadStopped. on_gone: called, from any thread,
    when the worker process ends by itself. gone: why it ended, None while it lives.
    process_memory: bytes of main memory it holds; None in this process, or where unknown.
    """

    on_gone: Callable[[], None] | None

    def run(self, request: Request[V]) -> Iterator[V]: ...
    def stop(self) -> None: ...
    def close(self) -> None: ...
    def gone(self) -> WorkerGone | None: ...
    def process_memory(self) -> int | None: ...


if TYPE_CHECKING:
    from medusa_chat.runtime.worker import Worker


class InProcess:
    """A Worker in this process."""

    on_gone: Callable[[], None] | None = None

    def __init__(self) -> None:
        self._stop = threading.Event()

    @cached_property
    def worker(self) -> "Worker":
        from medusa_chat.runtime.worker import Worker

        return Worker()

    def run(self, request: Request[V]) -> Iterator[V]:
        self._stop.clear()
        yield from self.worker.handle(request, self._stop.is_set)

    def stop(self) -> None:
        self._stop.set()

    def close(self) -> None:
        vars(self).pop("worker", None)  # and the model with it

    def gone(self) -> WorkerGone | None:
        return None

    def process_memory(self) -> int | None:
        return None
