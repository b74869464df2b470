"""Runner: where the model lives, as a session sees it. In this process (in_process.py: generate,
chat, bench, tests) or in a worker process (worker_process.py: the page)."""

from collections.abc import Callable, Iterator
from typing import Protocol

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
