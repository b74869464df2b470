"""FileRows: the matrices of a GGUF file as it stores them, for what our C code multiplies.

Formats: ggml's quants (ggml-common.h), those that most files use; another is unpacked to bf16.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import TYPES
from medusa_chat.decoding.backends.native_weights import Blocks, WeightStorage


class FileRows(WeightStorage):
    """The matrices of a GGUF file as it stores them, read when they are asked for."""

    def __init__(self, weights: GgufWeights) -> None:
        super().__init__()
        self._weights = weights
        self.bytes = sum(
            weights.bytes_of(name) for name in weights.places if self.is_in_blocks(name)
        )

    def is_in_blocks(self, name: str) -> bool:
        """Whether our C code multiplies the matrix of this name as it is stored."""
        return self._weights.stored_type(name) in PARTS

    def __call__(self, names: Sequence[str], weight: Tensor) -> Blocks | Tensor:
        """The blocks of the tensors of these names side by side; in bf16 where one is not stored in
        such. weight [outs, ins]: empty. Raises ModelError."""
        if all(map(self.is_in_blocks, names)):
            return Blocks.joined([self.blocks(name) for name in names])
        return torch.cat([self._weights.floats(name, torch.bfloat16) for name in names])

    def blocks(self, name: str) -> Blocks:
        """The blocks of a matrix that is stored in such. Raises ModelError."""
        kind = self._weights.stored_type(name)
        assert kind in PARTS
        outs, ins = self._weights.shapes[name]
        rows = np.concatenate(list(self._weights.blocks(name)))
        numbers, scales, floors = PARTS[kind](rows.reshape(-1, TYPES[kind][2]))
        tables = [None if part is None else part.reshape(outs, -1) for part in (scales, floors)]
        found = [None if part is None else torch.from_numpy(part.copy()) for part in tables]
        whole = torch.from_numpy(np.ascontiguousarray(numbers.reshape(outs, ins), np.int8))
        assert found[0] is not None
        return Blocks(whole, found[0], found[1])


Array = np.ndarray
Parts = tuple[Array, Array, Array | None]  # numbers [n, weights], scales [n, blocks], floors


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
