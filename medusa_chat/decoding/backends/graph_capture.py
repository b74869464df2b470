"""GraphCapture: records repeated work of a device, on CUDA as a graph."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone

WARM_UPS = 2  # before the one in which waiting is an error


@dataclass(frozen=True)
class State:
    """What one step passes to the next without the host: cur int64 [1], tokens in the cache; root
    int64 [1]; hidden [1, d], the backbone's state from which it was predicted. On the device."""

    cur: Tensor
    root: Tensor
    hidden: Tensor

    @classmethod
    def like(cls, hidden: Tensor) -> "State":
        """A state of zeros, for hidden states of this shape [1, d], dtype and device."""
        cur, root = (torch.zeros(1, dtype=torch.long, device=hidden.device) for _ in range(2))
        return cls(cur, root, torch.zeros_like(hidden))

    def put(self, length: int, root: int, hidden: Tensor) -> None:
        """Set the state: `length` tokens in the cache, the root, and hidden [1, d] in
        the dtype of the pass."""
        self.cur.fill_(length)
        self.root.fill_(root)
        if hidden is not self.hidden:
            self.hidden.copy_(hidden)


class GraphCapture:
    """Makes recordings. On CUDA they share a capture stream and a memory pool: they run one after
    another, and their results are copied out of the pool."""

    def __init__(self, backbone: Backbone, state: State) -> None:
        self.backbone, self.state = backbone, state
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        if backbone.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(backbone.device)

    def recorded(self, body: Callable[[], None]) -> Callable[[], None]:
        """A function with the effect of `body`: on CUDA the replay of its graph, else `body`
        itself.

        Warm-up steps start from the current state; the next real step overwrites what they write to
        the cache. In the last one waiting for the device is an error, so that a body which cannot
        be recorded fails here and not in the middle of a capture.
        """
        if self._stream is None:
            return body
        device, state = self.backbone.device, self.state
        kept = [t.clone() for t in (state.cur, state.root, state.hidden)]

        def put_back() -> None:
            for own, copy in zip((state.cur, state.root, state.hidden), kept, strict=True):
                own.copy_(copy)

        current = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        # a failed capture would leave its own stream as the current one
        with torch.cuda.device(device), torch.cuda.stream(current), _without_collection():
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    body()
                    put_back()
                with _unwaiting():
                    body()
                put_back()
            current.wait_stream(self._stream)
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                body()
        with torch.cuda.stream(current):
            put_back()  # capturing ran nothing
        return graph.replay

    def mend(self) -> None:
        """After a failed capture: take a new memory pool, for the old one may still be in use by
        the capture."""
        if self._stream is None:
            return
        device = self.backbone.device.index
        index = torch.cuda.current_device() if device is None else device
        with suppress(RuntimeError):  # where the capture failed before it allocated
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _unwaiting() -> Iterator[None]:
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
def _without_collection() -> Iterator[None]:
    """No garbage collection inside: freeing memory would invalidate a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
