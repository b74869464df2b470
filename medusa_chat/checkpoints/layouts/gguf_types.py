"""GgufHeader: what a GGUF file says of itself, and the types that its tensors can have."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# type of a tensor -> its name, how many weights a block has, and how many bytes
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98)},
    **{19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110)},
    **{22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56)},
    **{34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17)},
}
# type -> bytes of 32 weights as our C code keeps them (decoding/backends/kernels/weights.h)
KEPT = {2: 20, 3: 20, 6: 34, 7: 36, 8: 34, 12: 24, 13: 40, 14: 40}


@dataclass(frozen=True)
class Placed:
    """A tensor in a file. shape: rows first, as torch has it; type: a key of TYPES; start: its
    first byte in the file; file: the part of a split file that it lies in, by its name."""

    shape: tuple[int, ...]
    type: int
    start: int
    bytes: int
    file: str = ""


@dataclass(frozen=True)
class GgufHeader:
    """metadata: texts, numbers and short lists of numbers by key; of a list of texts, and of a long
    one, only the count. tensors: by name, in the order of the file or of its parts."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Placed]

    @property
    def kept_bytes(self) -> int:
        """Bytes of the matrices as our C code keeps them, an embedding that is no LM head left
        out; 0 where none of them is quantised so."""
        tensors = dict(self.tensors)
        if "output.weight" in tensors:
            tensors.pop("token_embd.weight", None)
        matrices = [(one.type, math.prod(one.shape)) for one in tensors.values() if one.shape[1:]]
        if not any(kind in KEPT for kind, _ in matrices):
            return 0
        return sum(
            count * KEPT[kind] // 32 if kind in KEPT else 2 * count for kind, count in matrices
        )

    @property
    def quantisation(self) -> str:
        """The type that most of the weights have, by its name."""
        sizes: dict[str, int] = {}
        for tensor in self.tensors.values():
            name = TYPES[tensor.type][0]
            sizes[name] = sizes.get(name, 0) + math.prod(tensor.shape)
        return max(sizes, key=lambda name: sizes[name])
