"""GraphCapture: work that never waits for the device, recorded as a CUDA graph."""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor

SHORTEST = 512  # positions that recorded work reads behind a short text
WARM_UPS = 2  # before the one in which waiting for the device is an error


class GraphCapture:
    """Records work. On CUDA it shares a capture stream and a memory pool: one piece runs after
    another, and its results are copied out of the pool, or their tensors kept."""

    def __init__(self, device: torch.device, changed: Sequence[Tensor] = ()) -> None:
        """changed: what the work changes and starts from, on the device."""
        self._device, self._changed = device, changed
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def recorded(self, body: Callable[[], None]) -> Callable[[], None]:
        """A function with the effect of `body`: on CUDA the replay of its graph, else `body`
        itself.

        Warm-up runs start from the current state; the next real one overwrites what they write to
        a cache. In the last one waiting for the device is an error, so that a body which cannot
        be recorded fails here and not in the middle of a capture.
        """
        if self._stream is None:
            return body
        device, kept = self._device, [tensor.clone() for tensor in self._changed]

        def restore() -> None:
            for own, copy in zip(self._changed, kept, strict=True):
                own.copy_(copy)

        current = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        # a failed capture would leave its own stream as the current one
        with torch.cuda.device(device), torch.cuda.stream(current), _no_garbage_collection():
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    body()
                    restore()
                with _no_waiting():
                    body()
                restore()
            current.wait_stream(self._stream)
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                body()
        with torch.cuda.stream(current):
            restore()  # capturing ran nothing
        return graph.replay

    def recover(self) -> None:
        """After a failed capture: take a new memory pool, for the old one may still be in use by
        the capture."""
        if self._stream is None:
            return
        number = self._device.index
        index = torch.cuda.current_device() if number is None else number
        with suppress(RuntimeError):  # where the capture failed before it allocated
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Waiting for the device raises an error inside."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls it a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """No garbage collection inside: freeing memory would invalidate a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def bucket_of(needed: int, most: int) -> int:
    """The positions, at most `most`, that recorded work reads if it needs so many: each size is a
    recording of its own, so the next one is half as large again. A multiple of 8, for masks
    (`aligned`)."""
    size = SHORTEST
    while size < needed:
        size += size // 2 + -(size // 2) % 8
    return min(size, most)


def said_of(error: Exception) -> str:
    """The first line of what made a recording fail: a failed capture hides the error behind it."""
    return str(error.__context__ or error).strip().partition("\n")[0]
