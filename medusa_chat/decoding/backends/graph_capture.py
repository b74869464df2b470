"""GraphCapture: what a device is to do again and again, recorded once: on CUDA a graph."""

import gc
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone

WARM_UPS = 2  # before one that may not wait


@dataclass(frozen=True)
class State:
    """What goes from step to step without the host: cur int64 [1], tokens in the cache; root int64
    [1]; hidden [1, d], the backbone's state that gave the root. All on the device."""

    cur: Tensor
    root: Tensor
    hidden: Tensor

    @classmethod
    def like(cls, hidden: Tensor) -> "State":
        """Room for such a state, and nothing yet."""
        cur, root = (torch.zeros(1, dtype=torch.long, device=hidden.device) for _ in range(2))
        return cls(cur, root, torch.zeros_like(hidden))

    def put(self, length: int, root: int, hidden: Tensor) -> None:
        """Behind `length` tokens, from this root on."""
        self.cur.fill_(length)
        self.root.fill_(root)
        if hidden is not self.hidden:
            self.hidden.copy_(hidden)


class GraphCapture:
    """Where recordings are made. On CUDA they share a stream to be recorded in and, as they run
    one after another and what is read of one lies outside, a pool of memory."""

    def __init__(self, backbone: Backbone, state: State) -> None:
        self.backbone, self.state = backbone, state
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        if backbone.device.type == "cuda":
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(backbone.device)

    def recorded(self, body: Callable[[], None]) -> Callable[[], None]:
        """What does as `body`, behind all that is queued now: on CUDA its graph, else itself.

        Warm-up steps begin where the next real one will: what they write behind the text, that one
        writes again. The last of them may not wait for the device, so that a body which cannot be
        recorded is found out before a capture that could only be broken off.
        """
        if self._stream is None:
            return body
        device, state = self.backbone.device, self.state
        kept = [t.clone() for t in (state.cur, state.root, state.hidden)]

        def put_back() -> None:
            for own, copy in zip((state.cur, state.root, state.hidden), kept, strict=True):
                own.copy_(copy)

        here = torch.cuda.current_stream(device)
        graph = torch.cuda.CUDAGraph()
        # a capture that fails leaves its own stream to be the current one
        with torch.cuda.device(device), torch.cuda.stream(here), _without_collection():
            self._stream.wait_stream(here)
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    body()
                    put_back()
                with _unwaiting():
                    body()
                put_back()
            here.wait_stream(self._stream)
            with torch.cuda.graph(graph, self._pool, self._stream, "thread_local"):
                body()
        with torch.cuda.stream(here):
            put_back()  # capturing ran nothing
        return graph.replay

    def mend(self) -> None:
        """After a capture that failed: other memory, for that of before may still be waiting for
        its end."""
        if self._stream is None:
            return
        device = self.backbone.device.index
        index = torch.cuda.current_device() if device is None else device
        with suppress(RuntimeError):  # where the capture failed before it allocated
            torch._C._cuda_endAllocateToPool(index, self._pool)
        self._pool = torch.cuda.graph_pool_handle()


@contextmanager
def _unwaiting() -> Iterator[None]:
    """What would wait for the device raises."""
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
    """No garbage is collected: memory that is freed inside a capture would spoil it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
