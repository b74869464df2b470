"""Threads: how many cores a model's steps use on a CPU."""

import torch
from torch import nn

# A thread of its own pays for this much of the weights: under it, the time until all threads have
# met is longer than what one of them saves (2 cores, fp32: one and two threads are equal at 24 MB,
# two are 1.4 times as fast at 80 MB).
EACH = 32 * 2**20
NATIVE_EACH = 4 * 2**20

_most = 0  # what torch came with, or what was left of it; 0: not asked yet


def leave_one() -> None:
    """Keep one core free for whoever shows what this process decodes.

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
    """Give this process the threads for a step that reads these modules' parameters; what was
    chosen, in words."""
    size = sum(p.nbytes for module in modules for p in module.parameters())
    threads = min(most(), max(1, round(size / EACH)))
    torch.set_num_threads(threads)
    return f"{threads} of {most()} threads for {size / 2**20:.0f} MiB a step"


def of_native(*modules: nn.Module) -> int:
    """Threads for our own C code, whose threads meet in a tenth of the time."""
    size = sum(p.nbytes for module in modules for p in module.parameters())
    return min(most(), max(1, round(size / NATIVE_EACH)))
