"""How the backbone's weights are stored in memory where our C code multiplies them.

Unchanged, rounded by us, or as the quantised rows of a GGUF file.
"""

import numpy as np
import torch
from torch import Tensor

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.device_plan import DevicePlan
from medusa_chat.checkpoints.gguf_backbone import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import KEPT
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import is_rounded
from medusa_chat.decoding.backends.native_weights import (
    UNCHANGED,
    Quantised,
    StoredRows,
    WeightStorage,
)
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
    return stored_rows(found) if plan.is_native and plan.precision == "bf16" else UNCHANGED


def stored_rows(found: Checkpoint) -> WeightStorage:
    """The quantised weights of the GGUF file that the backbone was converted from, where there is
    one. Raises ModelError."""
    if found.original is None or found.adapter is not None:
        return UNCHANGED
    return FileRows(GgufWeights.of(found.original, found.weights.config, "bf16"))


class FileRows(WeightStorage):
    """The quantised weights of one file, tensor by tensor."""

    def __init__(self, weights: GgufWeights) -> None:
        super().__init__()
        self._weights = weights
        self._places = {name: key for key, name in weights.names.items()}

    def __call__(self, name: str, weight: Tensor) -> StoredRows | Tensor:
        """The rows of the tensor of this name; the weight [outs, ins] itself where it is not
        stored so, or where they are not that weight. Raises ModelError."""
        rows = self.stored(name)
        return weight if rows is None or not rows.stands_for(weight) else rows

    def stored(self, name: str) -> StoredRows | None:
        """The rows of a tensor by its name in transformers; None where the file has no such tensor
        or stores it in a type that C does not multiply. Raises ModelError."""
        key = self._places.get(name)
        tensor = self._weights.header.tensors[key] if key is not None else None
        if key is None or tensor is None or tensor.type not in KEPT or len(tensor.shape) != 2:
            return None
        try:
            rows = np.concatenate(list(self._weights.rows(key)))
        except OSError as error:
            file = self._weights.file.with_name(tensor.file)
            raise ModelError(
                f"{file} cannot be read ({error.strerror or error}): try again"
            ) from error
        return StoredRows(tensor.type, torch.from_numpy(rows), tensor.shape[1])
