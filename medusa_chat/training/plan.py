"""Plan: the steps, memory and disk space that a training will need."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example
from medusa_chat.training.lora import adapter_size, is_tied
from medusa_chat.training.loss import ROWS_AT_ONCE
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import TrainingSetup
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.units import gb

FEW_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """The amount of work of a training. rows, held_out: examples. tokens, labels: of both.
    memory_bytes: the estimated peak. disk_bytes: of all that is written; free_bytes: free where it
    is written. notes: what was decided and why."""

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
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    notes: tuple[str, ...] = ()


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
    logits = 3 * 4 * ROWS_AT_ONCE * len(heads) * config.vocab_size
    layers = config.num_hidden_layers if adapter else 2
    held = 12 * model.dtype.itemsize + (22 * 4 if adapter else 0)  # peft's inputs in fp32
    passes = recipe.batch_tokens * config.hidden_size * held * layers
    return int(weights + trained + logits + passes + cached)


def disk_bytes(model: Any, heads: MedusaHeads, adapter: int, is_merged: bool) -> int:
    """Bytes of the checkpoint and of the training state beside it, twice while that is replaced."""
    size = sum(p.numel() for p in heads.parameters())
    state = (size + adapter) * 12
    whole = model.dtype.itemsize * model.num_parameters() if is_merged else adapter * 4
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
) -> Plan:
    """The plan of a training whose head settings are `stage`. Raises UsageError where the disk has
    too little space."""
    recipe, model = request.recipe, setup.model
    is_joint = recipe.method == "medusa-2"
    has_head_stage = is_joint and recipe.stages == 2
    notes = list(setup.notes)
    is_one = list(examples) == list(held_out)  # a single conversation is in both
    every = examples if is_one else (*examples, *held_out)
    if is_one:
        notes.append("there is one row alone: figures of held-out rows are of what was learnt")
    if stage.steps < FEW_STEPS:
        notes.append(
            f"heads learn little in {stage.steps} steps: raise --epochs or --max-steps, or give "
            "more data"
        )
    if is_joint and is_tied(model):
        notes.append("the LM head is tied to the embeddings: the adapter leaves both alone")
    adapter = adapter_size(model, recipe.lora_rank) if is_joint else 0
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
        tokens=sum(len(example.ids) for example in every),
        labels=sum(sum(example.is_label) for example in every),
        steps=stage.steps * (2 if has_head_stage else 1),
        memory_bytes=memory_bytes(model, heads, stage, adapter, cached),
        disk_bytes=needed,
        free_bytes=require_room(request.output.resolve().parent, needed),
        notes=tuple(notes),
    )
