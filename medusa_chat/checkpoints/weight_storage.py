"""How the backbone's weights are stored in memory where our C code multiplies them.

Unchanged, rounded by us, or as the rows of a GGUF file (gguf_rows.py).
"""

import torch

from medusa_chat.checkpoints import weights
from medusa_chat.checkpoints.device_plan import DevicePlan
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import is_rounded
from medusa_chat.checkpoints.packing import Packing
from medusa_chat.decoding.backends.native_weights import UNCHANGED, Quantised, WeightStorage

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


def keep_of(found: Checkpoint, plan: DevicePlan, packing: Packing | None = None) -> WeightStorage:
    """A GGUF file's own rows where it is used as it is, quantised for a quantised precision,
    widened in fp32 where the files are bf16; else unchanged, as where our C does not multiply.
    packing: of a file, perhaps of this one. Raises ModelError."""
    if plan.is_packed:
        weights = GgufWeights.of(found)
        is_same = packing is not None and packing.weights.header is weights.header
        if packing is not None and is_same and plan.device.type == "cpu":
            return FileRows(weights, packing.take)
        return FileRows(weights)
    rounded = rounding(plan.precision, plan.needs.device)
    if isinstance(rounded, Quantised):
        return rounded
    if plan.needs.widens(plan.precision) and file_dtype(found) == torch.bfloat16:
        return WeightStorage(torch.float32)
    return UNCHANGED
