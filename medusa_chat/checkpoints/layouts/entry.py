"""Entry: dtype and shape of one tensor in a file, without its values."""

import math
from dataclasses import dataclass

# bytes of one number, under the names that safetensors uses
SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


MAX_DIMENSIONS = 8


REMEDY = "fetch it again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a file, without its values. key: equal for tensors that share a storage."""

    dtype: str
    shape: tuple[int, ...]
    key: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * SIZES[self.dtype]
