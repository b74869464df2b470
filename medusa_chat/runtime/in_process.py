"""InProcess: the runner with the model in this process. The first request imports torch."""

import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

from medusa_chat.messages import Request, V
from medusa_chat.runtime.runner import WorkerGone

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
