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
from medusa_chat.training.joint import is_tied
from medusa_chat.training.loss import LMHead, medusa_loss
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import TrainingSetup
from medusa_chat.training.trainer import HeadRecipe, epoch_batches, head_inputs, make_batch


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
    batch = make_batch(epoch_batches(examples, recipe, 0)[0], recipe)
    device = heads.weight.device
    rows = head_inputs(model, len(heads), batch)  # once for whatever a first call does besides
    _synchronise(device)
    start = perf_counter()
    rows = head_inputs(model, len(heads), batch)
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
    """Weights, then value, gradient (and the one that is added to it) and optimizer's state of all
    that learns, then the largest tensors of a batch, and the hidden states that are kept."""
    config = model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = 2 if heads.weight.is_cuda else 8  # AdamW in 8 bit there
    learnt = (sum(p.numel() for p in heads.parameters()) + adapter) * (12 + states)
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


def plan(
    request: TrainRequest,
    setup: TrainingSetup,
    heads: MedusaHeads,
    learnt: Sequence[Example],
    held_out: Sequence[Example],
    steps: HeadRecipe,
) -> Plan:
    """Refuses where the disk is too full. Raises UsageError."""
    recipe, model = request.recipe, setup.model
    joint = recipe.method == "medusa-2"
    notes = list(setup.notes)
    if joint and is_tied(model):
        notes.append("the LM head is tied to the embeddings: the adapter leaves both alone")
    forward, learn = batch_seconds(model, setup.lm_head, heads, learnt, steps)
    each = 3 * forward + learn if joint else learn if steps.cache_hidden else forward + learn
    once = len(epoch_batches(learnt, steps, 0)) * forward if steps.cache_hidden else 0.0
    first = (forward + learn) * steps.steps if joint and recipe.stages == 2 else 0.0
    adapter = _adapter_size(model, recipe.lora_rank) if joint else 0
    labels = sum(sum(example.is_label) for example in learnt)
    width = setup.config.get_text_config().hidden_size * model.dtype.itemsize
    cached = labels * width if steps.cache_hidden else 0
    needed = disk_bytes(model, heads, adapter, joint and recipe.output == "merged")
    return Plan(
        backbone=request.backbone,
        method=recipe.method,
        recipe=recipe.name,
        device=str(setup.device),
        precision=setup.precision,
        rows=len(learnt),
        held_out=len(held_out),
        tokens=sum(len(e.ids) for e in (*learnt, *held_out)),
        labels=sum(sum(e.is_label) for e in (*learnt, *held_out)),
        steps=steps.steps * (2 if joint and recipe.stages == 2 else 1),
        seconds=once + each * steps.steps + first,
        memory_bytes=memory_bytes(model, heads, steps, adapter, cached),
        disk_bytes=needed,
        free_bytes=require_room(request.output.resolve().parent, needed),
        notes=tuple(notes),
    )


def _adapter_size(model: Any, rank: int) -> int:
    """Values of an adapter on every matrix of the layers."""
    shapes = [p.shape for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    return rank * sum(sum(shape) for shape in shapes)
