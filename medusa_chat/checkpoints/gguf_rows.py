"""FileRows: the matrices of a GGUF file as it stores them, for what our C code multiplies."""

from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints.gguf_weights import PIECE, GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import EIGHT_BITS, KEPT, TYPES
from medusa_chat.decoding.backends.native_library import Weights
from medusa_chat.decoding.backends.native_weights import StoredRows, UnreadRows, WeightStorage
from medusa_chat.decoding.layer_forms import DOWNS, GATES_UPS

STACKS = (f"experts.{GATES_UPS}", f"experts.{DOWNS}")


class FileRows(WeightStorage):
    """The matrices of a GGUF file as it stores them, read when they are asked for. bytes: of those
    in blocks, as the file has them. take: of the matrix of a name, what was packed of it before, as
    pack_rows gives it, or None."""

    def __init__(
        self,
        weights: GgufWeights,
        take: Callable[[str], tuple[Weights, Tensor] | None] = lambda name: None,
    ) -> None:
        super().__init__()
        self._weights, self._take = weights, take
        self._room = np.empty(PIECE * EIGHT_BITS // 32, np.uint8)  # new memory costs more
        self.bytes = sum(
            weights.bytes_of(name)
            for name in weights.places
            if self.is_in_blocks(name) or name.endswith(STACKS)
        )

    def is_in_blocks(self, name: str) -> bool:
        """Whether the matrix of this name is stored in quantised blocks."""
        return self._weights.stored_type(name) is not None

    def __call__(self, name: str, weight: Tensor) -> StoredRows | UnreadRows | Tensor:
        """The rows of the matrix of this name, of 8 bits where C does not know their type; in bf16
        where the file has floats. weight [outs, ins]: empty. Raises ModelError, as does what reads
        the rows."""
        return self.rows(name) if self.is_in_blocks(name) else self.floats(name)

    def experts(self, name: str, weight: Tensor, half: int | None) -> Iterator[StoredRows | Tensor]:
        """See WeightStorage. weight: empty. Raises ModelError."""
        tensor = self._weights.header.tensors[self._weights.stack(name, half)[0]]
        if TYPES[tensor.type][1] == 1:
            return self._weights.expert_floats(name, half, torch.bfloat16)
        if tensor.type not in KEPT:
            floats = self._weights.expert_floats(name, half, torch.bfloat16)
            return (StoredRows.of(one) for one in floats)
        blocks = self._weights.expert_blocks(name, half)
        return (StoredRows(tensor.type, torch.from_numpy(x), tensor.shape[-1]) for x in blocks)

    def rows(self, name: str) -> StoredRows | UnreadRows:
        """The rows of a matrix that is stored in blocks. Raises ModelError."""
        kind, (outs, ins) = self._weights.stored_type(name), self._weights.shapes[name]
        assert kind is not None
        if kind not in KEPT:
            return StoredRows.of(self.floats(name))
        return UnreadRows(kind, outs, ins, lambda: self._pieces(name), lambda: self._take(name))

    def floats(self, name: str) -> Tensor:
        """A matrix in bf16. Raises ModelError."""
        return self._weights.floats(name, torch.bfloat16)

    def _pieces(self, name: str) -> Iterator[Tensor]:
        return map(torch.from_numpy, self._weights.blocks(name, self._room))
