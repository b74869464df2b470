"""Plan: what a training will take, from one batch timed on this machine. Told before it starts."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example
from medusa_chat.training.loss import LMHead, medusa_loss
from medusa_chat.training.trainer import HeadRecipe, batch_of, epoch_of, rows_of


@dataclass(frozen=True)
class Plan:
    """seconds: of training alone, as one batch took. memory_bytes: at the peak, estimated.
    disk_bytes: of what will be written; free_bytes: where it will be. notes: what was decided."""

    backbone: str
    method: str
    recipe: str
    device: str
    precision: str
    rows: int
    held_out: int
    tokens: int
    labels: int
    steps: int
    seconds: float
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    notes: tuple[str, ...] = ()


def batch_seconds(
    model: Any, lm_head: LMHead, heads: MedusaHeads, examples: Sequence[Example], recipe: HeadRecipe
) -> tuple[float, float]:
    """Seconds of one batch: the backbone's forward pass; the heads' forward and backward."""
    batch = batch_of(epoch_of(examples, recipe, 0)[0], recipe)
    device = heads.weight.device
    rows = rows_of(model, len(heads), batch)  # once for whatever a first call does besides
    _synchronise(device)
    start = perf_counter()
    rows = rows_of(model, len(heads), batch)
    _synchronise(device)
    middle = perf_counter()
    result = medusa_loss(heads, lm_head, rows.hidden, rows.targets, 1.0, recipe.rows_at_once)
    result.total.backward()
    heads.zero_grad(set_to_none=True)
    _synchronise(device)
    return middle - start, perf_counter() - middle


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bytes(
    model: Any, heads: MedusaHeads, recipe: HeadRecipe, adapter: int, cached: int
) -> int:
    """Weights, then value, gradient and optimizer's state of all that learns, then the largest
    tensors of a batch, and the hidden states that are kept."""
    config = model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = 2 if heads.weight.is_cuda else 8  # AdamW in 8 bit there
    learnt = (sum(p.numel() for p in heads.parameters()) + adapter) * (8 + states)
    logits = 3 * 4 * recipe.rows_at_once * len(heads) * config.vocab_size
    width = config.hidden_size * model.dtype.itemsize
    passes = recipe.batch_tokens * width * (12 * (config.num_hidden_layers if adapter else 2))
    return int(weights + learnt + logits + passes + cached)


def disk_bytes(model: Any, heads: MedusaHeads, adapter: int, is_merged: bool) -> int:
    """The checkpoint, and the state that lies beside it until the end."""
    size = sum(p.numel() for p in heads.parameters())
    state = (size + adapter) * 12
    whole = 2 * model.num_parameters() if is_merged else adapter * 4
    return int(2 * state + size * 4 + whole)


def require_room(folder: Path, needed: int) -> int:
    """Free bytes where the output will be. Raises UsageError when they are too few."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder} has {free / 1e9:.1f} GB free and the training needs {needed / 1e9:.1f} GB: "
            "make room, or give another --output"
        )
    return free
