"""Quantised backbones: what was quantised once is kept, and loaded again without its source."""

from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import BitsAndBytesConfig

from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.kept_copies import Origin
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.errors import first_line

FORMAT = 1
KIND = "quantised"


def find(found: Checkpoint, precision: str, dtype: str) -> Path | None:
    """The folder with this backbone quantised, None where it was not or has changed since. dtype:
    of what stays in 16 bits. No file of the source is opened."""
    folder = _folder(found, precision, dtype)
    return folder if kept_copies.is_kept(folder) else None


def keep(model: Any, found: Checkpoint, precision: str, dtype: str, size: int) -> str:
    """Save a quantised backbone of `size` bytes as it was loaded; a sentence that says so, or why
    it is not kept: a cache that cannot be written only costs time."""
    folder = _folder(found, precision, dtype)
    origin = Origin(found.name, str(found.source.resolve()), precision)
    try:
        if not kept_copies.has_room(folder, size):
            return f"the {precision} weights are not kept: the disk of {folder.parent} is full"
        with kept_copies.writing(folder, origin) as partial:
            model.save_pretrained(partial, max_shard_size="4GB")
    except (OSError, SafetensorError) as error:
        return f"the {precision} weights are not kept in {folder.parent}: {first_line(error)}"
    return f"the {precision} weights are kept for the next load (medusa-chat models list)"


def _folder(found: Checkpoint, precision: str, dtype: str) -> Path:
    files = [found.backbone / name for name in ("config.json", *found.weights.files)]
    facts = [FORMAT, precision, dtype, metadata.version("bitsandbytes")]
    return kept_copies.place(KIND, facts, files)


def settings(precision: str, half: torch.dtype) -> BitsAndBytesConfig:
    """bitsandbytes' configuration for int8 or nf4 (double quantisation). half: the dtype of what
    is computed."""
    if precision == "int8":
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=half,
    )
