"""How the backbone's weights are stored in memory where our C code multiplies them.

Unchanged, rounded by us, or as the quantised blocks of a GGUF file: whole numbers, scales and
floors. Formats: ggml's quants (ggml-common.h), those that most files use; a file with another is
unpacked to bf16.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.device_plan import DevicePlan
from medusa_chat.checkpoints.gguf_backbone import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import TYPES
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import is_rounded
from medusa_chat.decoding.backends.native_weights import UNCHANGED, Blocks, Quantised, WeightStorage
from medusa_chat.errors import ModelError

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
BITS = {"int8": 8, "nf4": 4}


def rounding(precision: str, device: str) -> WeightStorage:
    """Quantised for a quantised precision where our C multiplies it on this device; else
    unchanged."""
    is_ours = device == "cpu" and is_rounded(precision, this_cpu())
    return Quantised(BITS[precision]) if is_ours else UNCHANGED


def file_dtype(found: Checkpoint) -> torch.dtype | None:
    """The dtype of all floats in the backbone's files, whatever its config says; None where there
    are several or another. Raises ModelError."""
    kinds = set()
    for file in weights.weight_files(found):
        header = read_header(LocalFolder(file.parent), file.name)
        kinds |= {entry.dtype for entry in header.values() if entry.dtype[0] in "FB"}
    return DTYPES.get(kinds.pop()) if len(kinds) == 1 else None


def read_dtype(found: Checkpoint, keep: WeightStorage) -> torch.dtype | None:
    """In what the backbone is read, whatever the precision, so that its weights stay in their files
    until our C packs them; None where they are not packed so. Raises ModelError."""
    return None if keep.dtype is None else file_dtype(found) or torch.bfloat16


def keep_of(found: Checkpoint, plan: DevicePlan) -> WeightStorage:
    """Quantised for a quantised precision, a GGUF file's own numbers in bf16, widened in fp32 where
    the files are bf16; else unchanged, as where our C does not multiply. Raises ModelError."""
    rounded = rounding(plan.precision, plan.needs.device)
    if isinstance(rounded, Quantised):
        return rounded
    if plan.needs.widens(plan.precision) and file_dtype(found) == torch.bfloat16:
        return WeightStorage(torch.float32)
    return stored_blocks(found) if plan.is_native and plan.precision == "bf16" else UNCHANGED


Array = np.ndarray
Parts = tuple[Array, Array, Array | None]  # numbers [n, weights], scales [n, blocks], floors


def stored_blocks(found: Checkpoint) -> WeightStorage:
    """The quantised weights of the GGUF file that the backbone was converted from, where there is
    one. Raises ModelError."""
    if found.original is None or found.adapter is not None:
        return UNCHANGED
    return StoredBlocks(GgufWeights.of(found.original, found.weights.config, "bf16"))


class StoredBlocks(WeightStorage):
    """The quantised weights of one file, tensor by tensor."""

    def __init__(self, weights: GgufWeights) -> None:
        super().__init__()
        self._weights = weights
        self._places = {name: key for key, name in weights.names.items()}

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """The blocks of the tensors of these names side by side; the weight [outs, ins] itself
        where one is not stored so, or where they are not that weight. Raises ModelError."""
        parts = [part for part in map(self.blocks, names) if part is not None]
        if len(parts) < len(names):
            return weight
        blocks = Blocks.joined(parts)
        return blocks if blocks.stands_for(weight) else weight

    def blocks(self, name: str) -> Blocks | None:
        """The blocks of a tensor by its name in transformers; None where the file has no such
        tensor or stores it in another format. Raises ModelError."""
        key = self._places.get(name)
        tensor = self._weights.header.tensors[key] if key is not None else None
        if key is None or tensor is None or tensor.type not in PARTS or len(tensor.shape) != 2:
            return None
        outs, ins = tensor.shape
        _, each, size = TYPES[tensor.type]
        try:
            rows = np.concatenate(list(self._weights.rows(key)))
        except OSError as error:
            file = self._weights.file.with_name(tensor.file)
            raise ModelError(
                f"{file} cannot be read ({error.strerror or error}): try again"
            ) from error
        numbers, scales, floors = PARTS[tensor.type](rows.reshape(-1, size))
        shaped = [None if part is None else part.reshape(outs, -1) for part in (scales, floors)]
        assert numbers.size == outs * ins == len(rows) * ins and ins % each == 0
        found = [None if part is None else torch.from_numpy(part.copy()) for part in shaped]
        whole = torch.from_numpy(np.ascontiguousarray(numbers.reshape(outs, ins), np.int8))
        assert found[0] is not None
        return Blocks(whole, found[0], found[1])


def _halves(blocks: Array, at: int) -> Array:
    """fp16 [n, 1] at a byte of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)


def _nibbles(stored: Array) -> Array:
    """The lower halves of bytes [n, k], then the upper ones: [n, 2 * k]."""
    return np.concatenate([stored & 15, stored >> 4], axis=1)


def _fifth_bits(stored: Array) -> Array:
    """Of 4 bytes [n, 4] each bit as 16 or 0: [n, 32]."""
    return np.unpackbits(stored, axis=1, bitorder="little") << 4


def _q4_0(blocks: Array) -> Parts:
    scales = _halves(blocks, 0)
    return _nibbles(blocks[:, 2:]), scales, scales * np.float16(-8)


def _q4_1(blocks: Array) -> Parts:
    return _nibbles(blocks[:, 4:]), _halves(blocks, 0), _halves(blocks, 2)


def _q5_0(blocks: Array) -> Parts:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return numbers.astype(np.int8) - np.int8(16), _halves(blocks, 0), None


def _q5_1(blocks: Array) -> Parts:
    numbers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Array) -> Parts:
    return blocks[:, 2:].view(np.int8), _halves(blocks, 0), None


def _k_scales(blocks: Array) -> tuple[Array, Array]:
    """Scales and floors fp32 [n, 8] of Q4_K and Q5_K: 6 bits each, in the bytes from 4 to 15."""
    d, least = (_halves(blocks, at).astype(np.float32) for at in (0, 2))
    first, second, third = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = np.concatenate([first & 63, (third & 15) | (first >> 6 << 4)], axis=1)
    floors = np.concatenate([second & 63, (third >> 4) | (second >> 6 << 4)], axis=1)
    return d * scales, -(least * floors)


def _k_nibbles(stored: Array) -> Array:
    """Bytes [n, 128] -> [n, 8, 32]: of every 32 bytes the lower halves, then the upper ones."""
    lines = stored.reshape(-1, 4, 1, 32)
    return np.concatenate([lines & 15, lines >> 4], axis=2).reshape(-1, 8, 32)


def _q4_k(blocks: Array) -> Parts:
    return _k_nibbles(blocks[:, 16:]), *_k_scales(blocks)


def _q5_k(blocks: Array) -> Parts:
    bits = np.unpackbits(blocks[:, 16:48, None], axis=2, bitorder="little")  # [n, 32, 8]
    return _k_nibbles(blocks[:, 48:]) | bits.transpose(0, 2, 1) << 4, *_k_scales(blocks)


def _q6_k(blocks: Array) -> Parts:
    low = blocks[:, :128].reshape(-1, 2, 1, 64)
    low = np.concatenate([low & 15, low >> 4], axis=2).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    high = high >> np.arange(0, 8, 2, dtype=np.uint8).reshape(1, 1, 4, 1) & 3
    numbers = (low | high << 4).astype(np.int8) - np.int8(32)
    scales = _halves(blocks, 208).astype(np.float32) * blocks[:, 192:208].view(np.int8)
    return numbers, scales, None


PARTS: dict[int, Callable[[Array], Parts]] = {
    **{2: _q4_0, 3: _q4_1, 6: _q5_0, 7: _q5_1, 8: _q8_0},
    **{12: _q4_k, 13: _q5_k, 14: _q6_k},
}
