"""A model of torch's CUDA caching allocator, fed by what real code allocates and frees.

The rules of c10/cuda/CUDACachingAllocator.cpp: sizes in steps of 512 bytes; up to 1 MB from
segments of 2 MB, up to 10 MB from segments of 20 MB, beyond that from one of its own in steps of
2 MB; the smallest free block that fits is taken and split; neighbours that are free become one; a
segment goes back to the device only by empty_cache, and only whole.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

STEP = 512
SMALL, LARGE = 1 << 20, 10 << 20
SMALL_SEGMENT, LARGE_SEGMENT, ROUND = 2 << 20, 20 << 20, 2 << 20


@dataclass(eq=False)
class Block:
    """Bytes from `start` on in a segment."""

    segment: "Segment"
    start: int
    size: int
    is_free: bool = True


class Segment:
    """What the device gave in one piece; its blocks in order."""

    def __init__(self, size: int, is_small: bool) -> None:
        self.size, self.is_small = size, is_small
        self.blocks = [Block(self, 0, size)]

    @property
    def is_free(self) -> bool:
        return len(self.blocks) == 1 and self.blocks[0].is_free


class CachingAllocator:
    """reserved: bytes taken from the device; peak: the most that were; allocated: those in use."""

    def __init__(self) -> None:
        self.segments: list[Segment] = []
        self.allocated = self.peak = 0

    @property
    def reserved(self) -> int:
        return sum(segment.size for segment in self.segments)

    def allocate(self, size: int) -> Block:
        """The block for `size` bytes."""
        size = -(-max(size, 1) // STEP) * STEP
        is_small = size <= SMALL
        block = self._best(size, is_small) or self._grown(size, is_small)
        rest = block.size - size
        if rest >= STEP if is_small else rest > SMALL:
            blocks = block.segment.blocks
            block.size = size
            at = blocks.index(block) + 1
            blocks.insert(at, Block(block.segment, block.start + size, rest))
        block.is_free = False
        self.allocated += block.size
        self.peak = max(self.peak, self.reserved)
        return block

    def free(self, block: Block) -> None:
        """Give a block back to the cache."""
        self.allocated -= block.size
        block.is_free = True
        blocks = block.segment.blocks
        at = blocks.index(block)
        for left, right in ((at, at + 1), (at - 1, at)):
            if left < 0 or right >= len(blocks):
                continue
            if blocks[left].is_free and blocks[right].is_free:
                blocks[left].size += blocks.pop(right).size

    def empty_cache(self) -> None:
        """Give the segments back that are wholly free."""
        self.segments = [segment for segment in self.segments if not segment.is_free]

    def _best(self, size: int, is_small: bool) -> Block | None:
        free = [
            block
            for segment in self.segments
            if segment.is_small == is_small
            for block in segment.blocks
            if block.is_free and block.size >= size
        ]
        return min(free, key=lambda block: block.size, default=None)

    def _grown(self, size: int, is_small: bool) -> Block:
        own = -(-size // ROUND) * ROUND
        segment = SMALL_SEGMENT if is_small else LARGE_SEGMENT if size < LARGE else own
        self.segments.append(Segment(segment, is_small))
        return self.segments[-1].blocks[0]


class Recorded(TorchDispatchMode):
    """Every storage that an operator makes while this is active is a block of `allocator` until it
    is freed; tensors on "meta" stand for the device's, but not those that `empty` makes there,
    which are placeholders on the device as well. bytes_of: what a storage of so many bytes stands
    for."""

    def __init__(
        self, allocator: CachingAllocator, bytes_of: Callable[[int], int] = lambda size: size
    ) -> None:
        super().__init__()
        self.allocator, self.bytes_of = allocator, bytes_of
        self.blocks: dict[int, tuple[StorageWeakRef, Block | None]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.collect()
        for storage in _storages((args, kwargs)):  # made elsewhere: not of the device
            self.blocks.setdefault(storage._cdata, (StorageWeakRef(storage), None))
        out = func(*args, **(kwargs or {}))
        is_placeholder = func is torch.ops.aten.empty.memory_format and out.is_meta
        for storage in _storages(out):
            if storage._cdata not in self.blocks:
                size = self.bytes_of(storage.nbytes())
                block = None if is_placeholder else self.allocator.allocate(size)
                self.blocks[storage._cdata] = StorageWeakRef(storage), block
        return out

    def collect(self) -> None:
        """Free the blocks of storages that nobody has any more."""
        for key, (storage, block) in list(self.blocks.items()):
            if storage.expired():
                del self.blocks[key]
                if block is not None:
                    self.allocator.free(block)

    def empty_cache(self) -> None:
        """In the place of torch.cuda.empty_cache."""
        self.collect()
        self.allocator.empty_cache()


def _storages(values: Any) -> list[torch.UntypedStorage]:
    return [v.untyped_storage() for v in tree_iter(values) if isinstance(v, torch.Tensor)]
