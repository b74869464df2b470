"""CPU threads: how many threads a model's steps use."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from medusa_chat.units import gb

# Bytes of weights from which one more thread pays: with fewer, synchronising takes longer than the
# thread saves (2 cores, fp32: one and two threads are equal at 24 MB, two are 1.4 times as fast at
# 80 MB).
EACH = 32 * 2**20
NATIVE_EACH = 4 * 2**20

_most = 0  # torch's default, or what `leave_one` left of it; 0: not read yet


def leave_one() -> None:
    """Keep one core free for the page and the browser.

    Threads that compute wait for each other without sleeping: with a browser that draws on one of
    two cores, a step of the demo took nine times as long as alone.
    """
    global _most
    _most = max(1, most() - 1)


def most() -> int:
    """The threads that a large model gets."""
    global _most
    _most = _most or torch.get_num_threads()
    return _most


def settle(*modules: nn.Module) -> str:
    """Set torch's threads for steps that read these modules' parameters; returns a sentence about
    it."""
    size = sum(p.nbytes for module in modules for p in module.parameters())
    threads = min(most(), max(1, round(size / EACH)))
    torch.set_num_threads(threads)
    return f"{threads} of {most()} CPU threads; a step reads {gb(size)}"


@contextmanager
def of_torch(count: int) -> Iterator[None]:
    """As many threads for torch inside. Beside our C it gets one: more would spin on its cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def of_native(*modules: nn.Module) -> int:
    """Threads for our own C code, where synchronising takes a tenth of the time."""
    size = sum(p.nbytes for module in modules for p in module.parameters())
    return min(most(), max(1, round(size / NATIVE_EACH)))
