"""The weights of a GGUF file, tensor by tensor: its own blocks, or the floats that they stand for.

Nothing is copied to disk and nothing is mapped: each tensor is read piece by piece. What
llama.cpp's converter changed is changed back: the row order of queries and keys of Llama and its
kin, the 1 added to Gemma's norms, keys and values of DeepSeek in two parts, gpt-oss's experts.
"""

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints.layouts.gguf_config import family_of
from medusa_chat.checkpoints.layouts.gguf_header import TYPES, GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.gguf_names import (
    TURNED,
    TURNED_KEYS,
    is_split,
    renamed,
    shapes,
)
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.errors import ModelError

PIECE = 1 << 22  # weights that are read at once: 16 MB as fp32, a few as they are stored
PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")  # queries and keys reordered
RAISED = ("gemma", "gemma2", "gemma3")  # norms with 1 added
THREADS = min(4, os.cpu_count() or 1)
# type -> where numbers of fp16 lie in a block, by which all others of it are multiplied
SCALES: dict[int, tuple[int, ...]] = {
    **dict.fromkeys((2, 6, 8, 16, 17, 18, 19, 20, 21, 22, 23), (0,)),
    **dict.fromkeys((3, 7, 12, 13), (0, 2)),
    **{10: (80, 82), 11: (108,), 14: (208,), 34: (52,), 35: (64,)},
}
ENDLESS = 0x7C00  # the exponent of infinities and of what is no number, in fp16


@dataclass(frozen=True)
class GgufWeights:
    """The tensors of a model. file: of a split one the first part. names: tensor of the file ->
    tensor of transformers. family: its name in the file. heads: (queries', keys')."""

    file: Path
    header: GgufHeader
    names: Mapping[str, str]
    family: str
    heads: tuple[int, int]

    @classmethod
    def of(cls, found: Checkpoint) -> "GgufWeights":
        """The weights of a checkpoint's GGUF file. Raises ModelError."""
        file, config = found.source, found.weights.config
        header = read_gguf(LocalFolder(file.parent, only=file.name), file.name)
        family = family_of(header, str(file))
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        return cls(file, header, renamed(header, family, str(file)), family, heads)

    @cached_property
    def places(self) -> Mapping[str, Sequence[str]]:
        """Tensor of transformers -> the tensors of the file that it is made of."""
        found: dict[str, list[str]] = {}
        for name, place in self.names.items():
            found.setdefault(place, []).append(name)
        return {place: sorted(names) for place, names in found.items()}

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of each tensor of transformers."""
        return shapes(self.header, self.names, self.family)

    @property
    def parameters(self) -> int:
        """How many weights there are."""
        return sum(map(math.prod, self.shapes.values()))

    def refuse_unlike(self, model: Any) -> None:
        """Refuse tensors that are not those of the model. Raises ModelError."""
        expected = {name: tuple(one.shape) for name, one in model.state_dict().items()}
        if model.config.tie_word_embeddings:
            expected.pop("lm_head.weight", None)
        if odd := sorted(self.shapes.keys() ^ expected.keys()):
            lacks = "lacks" if odd[0] in expected else "holds the tensor"
            family = model.config.model_type
            why = "" if odd[0] in expected else f", which {family} has no place for"
            raise ModelError(f"{self.file} {lacks} {odd[0]}{why}: take another GGUF file")
        for name, shape in self.shapes.items():
            if shape != expected[name]:
                raise ModelError(
                    f"{self.file}: tensor {name} is {shape}, {expected[name]} was expected: "
                    "download it again"
                )

    def is_matrix(self, place: str) -> bool:
        """Whether a tensor of transformers is one matrix of the file."""
        names = self.places.get(place, ())
        return len(names) == 1 and len(self.header.tensors[names[0]].shape) == 2

    def stored_type(self, place: str) -> int | None:
        """The type of the blocks of a matrix; None for what is none, and for floats."""
        if not self.is_matrix(place):
            return None
        kind = self.header.tensors[self.places[place][0]].type
        return None if TYPES[kind][1] == 1 else kind

    def stack(self, place: str, half: int | None) -> tuple[str, int, int]:
        """Where a stack of experts' matrices of transformers lies: the tensor of the file, its
        first part and how many parts further the next expert's is. half: 0 the gates, 1 the ups, of
        a place that has both; None: the whole."""
        names = self.places[place]
        if half is None or len(names) > 1:
            return names[half or 0], 0, 1
        return names[0], half, 2

    def expert_blocks(self, place: str, half: int | None) -> Iterator[np.ndarray]:
        """The rows of each expert's matrix as the file stores them, uint8 [rows, bytes of a row].
        Raises ModelError."""
        name, start, step = self.stack(place, half)
        tensor = self.header.tensors[name]
        parts = tensor.shape[0] * step
        for part in range(start, parts, step):
            rows = np.concatenate(list(self._rows(name, part, parts)))
            if TYPES[tensor.type][1] > 1:
                _refuse_endless(rows, tensor.type, self._told(name))
            yield rows

    def expert_floats(self, place: str, half: int | None, dtype: torch.dtype) -> Iterator[Tensor]:
        """Each expert's matrix [outs, ins], unpacked. Raises ModelError."""
        name, *_ = self.stack(place, half)
        tensor = self.header.tensors[name]
        for rows in self.expert_blocks(place, half):
            found = _unpacked([(rows, tensor.type)], dtype, 0.0, False, self._told(name))
            yield found.view(len(rows), tensor.shape[-1])

    def bytes_of(self, place: str) -> int:
        """What a tensor of transformers takes in the file."""
        return sum(self.header.tensors[name].bytes for name in self.places[place])

    def blocks(self, place: str, room: np.ndarray | None = None) -> Iterator[np.ndarray]:
        """The rows of a matrix of which `stored_type` is known, as the file stores them, in the
        order of transformers: uint8 [n, bytes of a row], some at a time. room: bytes in which
        a piece lies until the next one is asked for, where it fits there. Raises ModelError."""
        name = self.places[place][0]
        kind = self.header.tensors[name].type
        for rows in self._rows(name, room=room):
            _refuse_endless(rows, kind, self._told(name))
            yield rows

    def floats(self, place: str, dtype: torch.dtype) -> Tensor:
        """A tensor of transformers, unpacked. Raises ModelError."""
        out, at = torch.empty(self.shapes[place], dtype=dtype), 0
        flat = out.view(-1)
        if flat.numel() <= PIECE:  # most tensors: no thread is worth it
            for job in self._pieces(place, dtype):
                at = _put(flat, at, _unpacked(*job))
            return out
        with ThreadPoolExecutor(THREADS) as pool:
            waiting: deque[Future[Tensor]] = deque()
            for job in self._pieces(place, dtype):
                waiting.append(pool.submit(_unpacked, *job))
                if len(waiting) > THREADS:  # so much is in memory at once, and no more
                    at = _put(flat, at, waiting.popleft().result())
            for one in waiting:
                at = _put(flat, at, one.result())
        assert at == flat.numel()
        return out

    def _pieces(self, place: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
        """What _unpacked takes, for some rows at a time."""
        for names, part, parts in self._parts(place):
            name, kinds = names[0], [self.header.tensors[name].type for name in names]
            added = 1.0 if self.family in RAISED and name.endswith("norm.weight") else 0.0
            is_turned = self._is_turned(name)
            pieces: list[Iterable[np.ndarray]] = [self._rows(name, part, parts) for name in names]
            if is_turned:
                pieces = [[np.concatenate(list(rows))] for rows in pieces]
            for rows in zip(*pieces, strict=True):
                stored = list(zip(rows, kinds, strict=True))
                yield stored, dtype, added, is_turned, self._told(name)

    def _told(self, name: str) -> str:
        return f"{self.file}: tensor {name}"

    def _is_turned(self, name: str) -> bool:
        return name.endswith(TURNED_KEYS) or (self.family in TURNED and "_exps." in name)

    def _parts(self, place: str) -> Iterator[tuple[Sequence[str], int, int]]:
        """(tensors of the file, which part of them, of how many) in the order of a tensor of
        transformers: whole ones, and for each expert its gate before its up, or both at once."""
        names = self.places[place]
        is_paired = self._is_turned(names[0]) and not is_split(names[0])
        apart = [names] if is_paired else [[name] for name in names]
        parts = self.header.tensors[names[0]].shape[0] if is_paired or len(names) > 1 else 1
        yield from ((few, part, parts) for part in range(parts) for few in apart)

    def _rows(
        self, name: str, part: int = 0, parts: int = 1, room: np.ndarray | None = None
    ) -> Iterator[np.ndarray]:
        """The rows of a tensor of the file as they are stored, uint8 [rows, bytes of a row], or of
        one of so many equal parts; those of reordered queries and keys in the order of
        transformers, for which they are read at once. room: see `blocks`. Raises ModelError."""
        tensor = self.header.tensors[name]
        whole = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        wide, count = tensor.bytes // whole, whole // parts
        heads = self._turned_heads(name)
        step = count if heads else max(1, PIECE // max(1, math.prod(tensor.shape) // whole))
        file = self.file.with_name(tensor.file)
        try:
            with open(file, "rb", buffering=0) as source:
                source.seek(tensor.start + part * count * wide)
                for start in range(0, count, step):
                    rows = min(step, count - start)
                    fits = room is not None and rows * wide <= len(room)
                    flat = room[: rows * wide] if fits else np.empty(rows * wide, np.uint8)
                    _fill(source, memoryview(flat))
                    stored = flat.reshape(rows, wide)
                    yield _turned_back(stored, heads) if heads else stored
        except OSError as error:
            raise ModelError(
                f"{file} cannot be read ({error.strerror or error}): try again"
            ) from error

    def _turned_heads(self, name: str) -> int:
        """How many heads of a tensor have their rows in llama.cpp's order; 0 for none."""
        if self.family not in PAIRED:
            return 0
        return self.heads[0] if ".attn_q." in name else self.heads[1] if ".attn_k." in name else 0


def _fill(source: Any, room: memoryview) -> None:
    """Read until the room is full. Raises OSError for a file that ends before."""
    while room:
        count = source.readinto(room)
        if not count:
            raise OSError(None, "it was cut while it was read")
        room = room[count:]


def _turned_back(stored: np.ndarray, heads: int) -> np.ndarray:
    """Rows (first, second, first, second of a head's pairs) -> all first ones, all second ones."""
    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, stored.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)


def _refuse_endless(rows: np.ndarray, kind: int, what: str) -> None:
    """Raises ModelError where a scale of a block is no number."""
    blocks = rows.reshape(-1, TYPES[kind][2])
    for at in SCALES.get(kind, ()):
        if not (blocks[:, at + 1] & (ENDLESS >> 8) < ENDLESS >> 8).all():
            raise _no_numbers(what)


def _no_numbers(what: str) -> ModelError:
    return ModelError(f"{what} holds values that are no numbers: download the file again")


def _put(flat: Tensor, at: int, values: Tensor) -> int:
    """Copy values behind the first `at` numbers -> where they end."""
    end = at + values.numel()
    flat[at:end] = values
    return end


def _unpacked(
    stored: Sequence[tuple[np.ndarray, int]],
    dtype: torch.dtype,
    added: float,
    is_turned: bool,
    what: str,
) -> Tensor:
    """The numbers of some rows one behind the other, in dtype. stored: the rows and their type;
    is_turned: of an expert all, column by column, of its gate and of its up in turn. what: they are
    of. Raises ModelError for what is none."""
    parts = [_numbers(rows, kind) for rows, kind in stored]
    values = np.stack([part.T for part in parts], -1) if is_turned else parts[0]
    if not np.isfinite(values).all():
        raise _no_numbers(what)
    if added:
        values = values - np.float32(added)
    with torch.no_grad():
        return torch.from_numpy(np.require(values, np.float32, "W")).to(dtype).reshape(-1)


def _numbers(stored: np.ndarray, kind: int) -> np.ndarray:
    import gguf  # only who has such a file needs it

    count = len(stored)
    if TYPES[kind][1] == 1:  # numbers, not blocks: of a vector, one to a row
        stored = stored.reshape(-1)
    if TYPES[kind][0] == "I64":
        return stored.view(np.int64).astype(np.float32).reshape(count, -1)
    with np.errstate(all="ignore"):
        return gguf.dequantize(stored, gguf.GGMLQuantizationType(kind)).reshape(count, -1)
