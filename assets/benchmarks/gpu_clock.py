"""The clock of gpu.py: the device's own on CUDA, the host's on a CPU. Milliseconds."""

from collections.abc import Callable
from statistics import median
from time import perf_counter
from typing import Any

import torch

from medusa_chat.checkpoints import kernel_times

WARM_UPS, TIMED = 5, 30
FLUSH = 2**30  # bytes, more than any cache


def timed(device: str, call: Callable[[], Any], repeats: int = TIMED) -> float:
    """The median milliseconds of a call."""
    for _ in range(WARM_UPS):
        call()
    return median(spans(device, call, repeats))


def cold(device: str, call: Callable[[], Any], repeats: int = 15) -> float:
    """The same with weights that lie in no cache, as in a step: a buffer larger than any is written
    before, which also hides what the host takes to launch the call."""
    is_cuda = device == "cuda"
    buffer = torch.empty(FLUSH if is_cuda else 1, dtype=torch.uint8, device=device)
    return median(spans(device, call, repeats + 3, buffer.zero_)[3:])


def spans(
    device: str, call: Callable[[], Any], count: int, before: Callable[[], Any] = lambda: None
) -> list[float]:
    """Milliseconds of each of `count` calls, each after `before`, which is not timed."""
    if device != "cuda":
        return [_by_host(call, before) for _ in range(count)]
    return [1e3 * seconds for seconds in kernel_times.spans(before, call, count)]


def _by_host(call: Callable[[], Any], before: Callable[[], Any]) -> float:
    before()
    began = perf_counter()
    call()
    return 1e3 * (perf_counter() - began)
