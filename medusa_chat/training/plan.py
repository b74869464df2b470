"""Plan: the time, memory and disk space that a training will need, from one timed batch."""

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
from medusa_chat.training.hidden_states import epoch_batches, head_inputs, make_batch
from medusa_chat.training.lora import is_tied
from medusa_chat.training.loss import LMHead, medusa_loss
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import TrainingSetup
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.units import gb


@dataclass(frozen=True)
class Plan:
    """The amount of work of a training. rows, held_out: examples. tokens, labels: of both. seconds:
    of the steps alone, from one timed batch. memory_bytes: the estimated peak. disk_bytes: of all
    that is written; free_bytes: free where it is written. notes: what was decided and why."""

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
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    short: ShortVocabulary | None = None,
) -> tuple[float, float]:
    """Seconds of one batch: (the backbone's forward pass, the heads' forward and backward). short:
    the vocabulary of the loss."""
    batch = make_batch(epoch_batches(examples, recipe, 0)[0], recipe)
    device = heads.weight.device
    rows = head_inputs(model, len(heads), batch)  # once for whatever a first call does besides
    _synchronise(device)
    start = perf_counter()
    rows = head_inputs(model, len(heads), batch)
    _synchronise(device)
    middle = perf_counter()
    rows = rows if short is None else short.inputs(rows)
    lm_head = lm_head if short is None else short.lm_head
    tensors = rows.hidden, rows.roots, rows.targets
    result = medusa_loss(heads, lm_head, *tensors, 1.0, recipe.rows_at_once)
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
    """Peak memory: weights; parameters, gradients (twice: a new one is added to the old) and
    optimizer state of all that is trained; the largest tensors of a batch; `cached` bytes of hidden
    states. adapter: parameters of the adapter."""
    config = model.config.get_text_config()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    states = 2 if heads.weight.is_cuda else 8  # AdamW in 8 bit there
    trained = (sum(p.numel() for p in heads.parameters()) + adapter) * (12 + states)
    logits = 3 * 4 * recipe.rows_at_once * len(heads) * config.vocab_size
    width = config.hidden_size * model.dtype.itemsize
    passes = recipe.batch_tokens * width * (12 * (config.num_hidden_layers if adapter else 2))
    return int(weights + trained + logits + passes + cached)


def disk_bytes(model: Any, heads: MedusaHeads, adapter: int, is_merged: bool) -> int:
    """Bytes of the checkpoint and of the training state beside it, twice while that is replaced."""
    size = sum(p.numel() for p in heads.parameters())
    state = (size + adapter) * 12
    whole = 2 * model.num_parameters() if is_merged else adapter * 4
    return int(2 * state + size * 4 + whole)


def require_room(folder: Path, needed: int) -> int:
    """Free bytes in the folder. Raises UsageError when they are fewer than `needed`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder} has {gb(free)} free and the training needs {gb(needed)}: "
            "free some disk space, or use another --output"
        )
    return free


def plan(
    request: TrainRequest,
    setup: TrainingSetup,
    heads: MedusaHeads,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    stage: HeadRecipe,
    short: ShortVocabulary | None = None,
) -> Plan:
    """The plan of a training whose head settings are `stage`. short: see train_heads.
    Raises UsageError where the disk has
    too little space."""
    recipe, model = request.recipe, setup.model
    is_joint = recipe.method == "medusa-2"
    has_head_stage = is_joint and recipe.stages == 2
    notes = list(setup.notes)
    if is_joint and is_tied(model):
        notes.append("the LM head is tied to the embeddings: the adapter leaves both alone")
    adapter = _adapter_size(model, recipe.lora_rank) if is_joint else 0
    labels = sum(sum(example.is_label) for example in examples)
    width = setup.config.get_text_config().hidden_size * model.dtype.itemsize
    cached = labels * width if stage.cache_hidden else 0
    needed = disk_bytes(model, heads, adapter, is_joint and recipe.output == "merged")
    return Plan(
        backbone=request.backbone,
        method=recipe.method,
        recipe=recipe.name,
        device=str(setup.device),
        precision=setup.precision,
        rows=len(examples),
        held_out=len(held_out),
        tokens=sum(len(e.ids) for e in (*examples, *held_out)),
        labels=sum(sum(e.is_label) for e in (*examples, *held_out)),
        steps=stage.steps * (2 if has_head_stage else 1),
        seconds=_seconds(setup, heads, examples, stage, is_joint, has_head_stage, short),
        memory_bytes=memory_bytes(model, heads, stage, adapter, cached),
        disk_bytes=needed,
        free_bytes=require_room(request.output.resolve().parent, needed),
        notes=tuple(notes),
    )


def _seconds(
    setup: TrainingSetup,
    heads: MedusaHeads,
    examples: Sequence[Example],
    stage: HeadRecipe,
    is_joint: bool,
    has_head_stage: bool,
    short: ShortVocabulary | None,
) -> float:
    """Seconds of all steps. A joint step passes through the backbone forwards and, at twice the
    cost, backwards."""
    forward, learn = batch_seconds(setup.model, setup.lm_head, heads, examples, stage, short)
    if is_joint:
        head_stage = forward + learn if has_head_stage else 0.0
        return (3 * forward + learn + head_stage) * stage.steps
    if stage.cache_hidden:
        return len(epoch_batches(examples, stage, 0)) * forward + learn * stage.steps
    return (forward + learn) * stage.steps


def _adapter_size(model: Any, rank: int) -> int:
    """Parameters of an adapter of this rank on every matrix of the layers."""
    shapes = [p.shape for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    return rank * sum(sum(shape) for shape in shapes)
