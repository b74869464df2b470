"""FileRows: the matrices of a GGUF file as it stores them, for what our C code multiplies."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import KEPT, TYPES
from medusa_chat.decoding.backends.native_weights import StoredRows, WeightStorage
from medusa_chat.decoding.layer_forms import DOWNS, GATES_UPS

STACKS = (f"experts.{GATES_UPS}", f"experts.{DOWNS}")


class FileRows(WeightStorage):
    """The matrices of a GGUF file as it stores them, read when they are asked for. bytes: of those
    in blocks, as the file has them."""

    def __init__(self, weights: GgufWeights) -> None:
        super().__init__()
        self._weights = weights
        self.bytes = sum(
            weights.bytes_of(name)
            for name in weights.places
            if self.is_in_blocks(name) or name.endswith(STACKS)
        )

    def is_in_blocks(self, name: str) -> bool:
        """Whether the matrix of this name is stored in quantised blocks."""
        return self._weights.stored_type(name) is not None

    def __call__(self, name: str, weight: Tensor) -> StoredRows | Tensor:
        """The rows of the matrix of this name, of 8 bits where C does not know their type; in bf16
        where the file has floats. weight [outs, ins]: empty. Raises ModelError."""
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

    def rows(self, name: str) -> StoredRows:
        """The rows of a matrix that is stored in blocks. Raises ModelError."""
        kind, (_, ins) = self._weights.stored_type(name), self._weights.shapes[name]
        assert kind is not None
        if kind not in KEPT:
            return StoredRows.of(self.floats(name))
        rows = np.concatenate(list(self._weights.blocks(name)))
        return StoredRows(kind, torch.from_numpy(rows), ins)

    def floats(self, name: str) -> Tensor:
        """A matrix in bf16. Raises ModelError."""
        return self._weights.floats(name, torch.bfloat16)
