"""Worker processes that start warm: forked from one that has imported torch and transformers.

A worker of the app is spawned and imports both, six seconds of a processor each time. That it does
is tested where a whole program is started; where a worker's life and death are, it starts here.
What the packages read from the environment at import they have read before: no test of the Hub
may use it.
"""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext
from types import SimpleNamespace
from typing import Any

import pytest

from medusa_chat.runtime import runner

HEAVY = ["torch", "transformers", "medusa_chat.checkpoints.load", "medusa_chat.runtime.worker"]


def _run_in(environment: dict[str, str], target: Callable[..., None], *arguments: Any) -> None:
    """What a spawned process has of itself: the environment of the process that asked for it."""
    os.environ.clear()
    os.environ.update(environment)
    target(*arguments)


class Warm(ForkServerContext):
    """Stands for the context "spawn"."""

    def Process(self, *, target: Any, args: tuple[Any, ...], **options: Any) -> Any:  # noqa: N802
        arguments = (dict(os.environ), target, *args)
        return super().Process(target=_run_in, args=arguments, **options)


def warm_context() -> Any:
    """Where warm processes come from; None on machines that do not fork."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return None
    context = Warm()
    context.set_forkserver_preload(HEAVY)
    return context


@contextmanager
def warm_starts() -> Iterator[None]:
    """While the block runs workers start warm, on machines that fork."""
    context = warm_context()
    if context is None:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        stand_in = SimpleNamespace(get_context=lambda kind: context)
        patch.setattr(runner, "multiprocessing", stand_in)
        yield


@pytest.fixture(scope="module", autouse=True)
def warm_workers() -> Iterator[None]:
    """For modules that import it."""
    with warm_starts():
        yield
