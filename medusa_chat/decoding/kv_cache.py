"""KVCache: preallocated keys and values; the accepted rows of a step are moved into place."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache

from medusa_chat.errors import ModelError, first_line


class Layer(CacheLayerMixin):
    """One layer of the cache for transformers: writes after `start` and returns the valid part.

    places: for steps of fixed shapes, where the rows are written instead, int64 [q] on the device;
    then all of the first `bucket` positions are returned.
    """

    keys: Tensor
    values: Tensor
    is_sliding = False

    def __init__(
        self, keys: Tensor, values: Tensor, places: Tensor | None = None, bucket: int = 0
    ) -> None:
        super().__init__()
        self.keys, self.values, self.places, self.bucket = keys, values, places, bucket
        self.start = 0
        self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Does nothing: keys and values [1, H, capacity, D] are allocated already, in the dtype of
        the cache."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write [1, H, q, D]; return keys and values [1, H, s, D], all in the cache's dtype."""
        rows = key_states.shape[2]
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            if self.places is None:
                kept[:, :, self.start : self.start + rows] = new
            else:
                kept.index_copy_(2, self.places, new)
        return self.read(rows)

    def read(self, rows: int) -> tuple[Tensor, Tensor]:
        """Keys and values [1, H, s, D] in the cache's dtype that a pass of this many rows reads."""
        end = self.bucket or self.start + rows
        return self.keys[:, :, :end], self.values[:, :, :end]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.start + query_length, 0

    def get_seq_length(self) -> int:
        return self.start

    def get_max_length(self) -> int:
        return int(self.keys.shape[2])


class Shape(NamedTuple):
    """Keys or values of a layer: their heads, the width of a head, and their device."""

    heads: int
    width: int
    device: torch.device


class KVCache:
    """Keys and values of every layer, `capacity` positions, in one tensor per shape and device.

    length: how many positions are valid. A pass of the backbone writes its rows after them
    (transformers gets `layers`); `keep` then makes some of those rows valid. Rows after `length`
    are never read, or read masked (`fixed`); a masked row must be finite.
    aside: how many of the last rows hold another text, which `exchange` makes the valid one; 0 as
    soon as a pass may need their room (`claim`).
    """

    def __init__(self, shapes: list[Shape], capacity: int, dtype: torch.dtype) -> None:
        """shapes: of the first layer's keys, of its values, of the second layer's keys, ..."""
        self.length, self.capacity, self.aside = 0, capacity, 0
        blocks = {}
        for shape, count in Counter(shapes).items():
            size = (count, 1, shape.heads, capacity, shape.width)
            blocks[shape] = torch.zeros(size, dtype=dtype, device=shape.device)
        self._blocks = list(blocks.values())
        used, views = Counter[Shape](), []
        for shape in shapes:
            views.append(blocks[shape][used[shape]])
            used[shape] += 1
        self._layers = [Layer(k, v) for k, v in zip(views[::2], views[1::2], strict=True)]
        self.layers = Cache(layers=self._layers)

    @property
    def nbytes(self) -> int:
        """Size of the allocation in bytes."""
        return sum(block.nbytes for block in self._blocks)

    def begin(self) -> None:
        """Let the next pass write after the valid rows."""
        for layer in self._layers:
            layer.start = self.length

    def keep(self, path: Sequence[int]) -> None:
        """Make the rows `path` of the last pass valid, moving them directly after the valid rows if
        they are not there already."""
        start, count = self.length, len(path)
        if list(path) != list(range(count)):
            for block in self._blocks:
                chosen = torch.tensor([start + row for row in path], device=block.device)
                block[:, :, :, start : start + count] = block.index_select(3, chosen)
        self.length = start + count

    def extend(self, count: int) -> None:
        """Make the first `count` rows of the last pass valid, without moving them."""
        self.length += count

    def fixed(self, places: Tensor, bucket: int) -> Cache:
        """This cache for steps of fixed shapes: places int64 [q], where a pass writes its rows;
        bucket: positions that it reads."""
        pairs = [(layer.keys, layer.values) for layer in self._layers]
        return Cache(layers=[Layer(k, v, places, bucket) for k, v in pairs])

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the rows at `source` to `target`, both int64 [r] on the device; `length` stays."""
        for block in self._blocks:
            block.index_copy_(3, target, block.index_select(3, source))

    def rows(self, start: int, end: int) -> list[Tensor]:
        """Copies of the rows from `start` to `end`, for `put_back`: a tensor [L, 1, H, rows, D] for
        each shape and device, in the dtype of the cache."""
        return [block[:, :, :, start:end].clone() for block in self._blocks]

    def put_back(self, start: int, rows: list[Tensor], length: int) -> None:
        """Write rows [L, 1, H, rows, D] that `rows` copied, in their dtype, back to `start`, and
        make the first `length` positions valid."""
        for block, kept in zip(self._blocks, rows, strict=True):
            block[:, :, :, start : start + kept.shape[3]] = kept
        self.length = length

    def claim(self, rows: int) -> None:
        """Give up what is set aside if so many rows behind the valid ones reach into it."""
        if self.length + rows > self.capacity - self.aside:
            self.aside = 0

    def set_aside(self) -> None:
        """Copy the valid rows to the end, in place of what was set aside there."""
        for layer in self._layers:
            for rows in (layer.keys, layer.values):
                rows[:, :, self.capacity - self.length :] = rows[:, :, : self.length].clone()
        self.aside = self.length

    def exchange(self) -> None:
        """Make the text that is set aside the valid one, and set the valid one aside."""
        back, front = self.capacity - self.aside, self.capacity - self.length
        for layer in self._layers:
            for rows in (layer.keys, layer.values):
                other, valid = rows[:, :, back:].clone(), rows[:, :, : self.length].clone()
                rows[:, :, : self.aside] = other
                rows[:, :, front:] = valid
        self.length, self.aside = self.aside, self.length

    def fill(self, length: int) -> None:
        """Set the rows between the valid ones and `length` to a small constant, to time steps."""
        self.aside = 0
        for block in self._blocks:
            block[:, :, :, self.length : length] = 0.01

    def wipe(self) -> None:
        """Zero the rows after `length`, where a broken pass may have left NaN: steps of fixed
        shapes read them, masked."""
        self.aside = 0
        for block in self._blocks:
            block[:, :, :, self.length :] = 0

    def crop(self, length: int) -> None:
        """Forget everything after the first `length` of the valid positions."""
        self.length = length


@torch.no_grad()
def layer_shapes(decoder: Any, config: Any, device: torch.device) -> list[Shape]:
    """Shapes of each layer's keys and values, alternating, from a pass over one token; without the
    last layers of Gemma 3n and 4, which read the cache of earlier layers. Raises ModelError for a
    family without keys and values."""
    probe = torch.zeros(1, 1, dtype=torch.long, device=device)
    with refused(config, "a pass over one token fails"):
        cache = DynamicCache(config=config)
        decoder(input_ids=probe, past_key_values=cache, use_cache=True)
    read = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    while read and read[-1] is None:
        read.pop()
    if not read or not all(isinstance(tensor, Tensor) and tensor.dim() == 4 for tensor in read):
        raise ModelError(
            f"model family {config.model_type} is not supported: it has no standard key-value "
            "cache, with keys and values of its own in every layer"
        )
    return [Shape(tensor.shape[1], tensor.shape[3], tensor.device) for tensor in read]


@contextmanager
def refused(config: Any, what: str) -> Iterator[None]:
    """Turn errors of a family's own code into a ModelError, except running out of memory and losing
    the device."""
    try:
        yield
    except (torch.AcceleratorError, torch.OutOfMemoryError):
        raise
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ModelError(
            f"model family {config.model_type} is not supported: {what}: {first_line(error)}"
        ) from error
