"""Medusa-2: the backbone's LoRA adapter and the heads trained together, resumable at any step."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import pi, sin
from pathlib import Path
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example
from medusa_chat.training.events import Evaluated, TrainStep
from medusa_chat.training.hidden_states import PackedRows, stream_batches
from medusa_chat.training.joint_loss import evaluate_jointly, joint_loss
from medusa_chat.training.lora import adapter_tensors
from medusa_chat.training.loss import HeadLosses
from medusa_chat.training.optimizers import Optimizers, adamw
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import JointRecipe
from medusa_chat.training.teacher_states import TeacherStates
from medusa_chat.training.training_loop import optimizers_of, run_steps, with_evaluations
from medusa_chat.training.training_state import restore_state, save_state

SEED_STRIDE = 7919  # between the dropout seeds of two steps


def weight_of_heads(step: int, recipe: JointRecipe) -> float:
    """lambda_0 at a step from 0 (Medusa, arXiv 2401.10774, 2.2.2)."""
    if recipe.schedule == "constant":
        return recipe.lambda0
    return recipe.lambda0 * sin(pi / 2 * (step + 1) / recipe.heads.steps)


def train_jointly(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: JointRecipe,
    held_out: Sequence[Example] = (),
    state: Path | None = None,
    group: ProcessGroup = ALONE,
    short: ShortVocabulary | None = None,
    kept: TeacherStates | None = None,
) -> Iterator[TrainStep | Evaluated]:
    """Train the adapter of `model` (see add_adapter) and `heads` in place. state, held_out, group,
    short and errors: as in train_heads. kept: what its stage has kept."""
    if not examples:
        raise UsageError("there are no examples to train on: give other --data")
    heads.requires_grad_(True)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizers = [adamw(adapter, recipe.learning_rate, 0.0), *optimizers_of(heads, recipe.heads)]
    start = _restore(state, model, heads, optimizers, recipe)

    def save(done: int) -> None:
        if state is not None and group.is_first:
            save_state(state, heads, optimizers, done, recipe, adapter_tensors(model))

    steps = run_steps(
        stream_batches(examples, recipe.heads, start, group),
        partial(_step_loss, model, heads, recipe, group, short, kept),
        partial(_faulty, model, heads, recipe),
        *([*adapter, *heads.parameters()], optimizers, recipe.heads, save, group),
    )
    evaluation = partial(evaluate_jointly, model, heads, held_out, recipe) if held_out else None
    yield from with_evaluations(steps, recipe.heads, evaluation)


def _step_loss(
    model: Any,
    heads: MedusaHeads,
    recipe: JointRecipe,
    group: ProcessGroup,
    short: ShortVocabulary | None,
    kept: TeacherStates | None,
    step: int,
    rows: PackedRows,
) -> HeadLosses:
    """The loss of a step. The dropout depends on seed, step and process alone, so that a resumed
    training repeats it."""
    torch.manual_seed(recipe.heads.seed + SEED_STRIDE * step + group.rank)
    weight = weight_of_heads(step, recipe)
    states = None if kept is None else kept.take(step)
    return joint_loss(model, heads, rows, recipe, weight, group, True, short, states)


@torch.no_grad()
def _faulty(
    model: Any, heads: MedusaHeads, recipe: JointRecipe, step: int, rows: PackedRows
) -> Iterator[str]:
    """Names of the examples whose loss is not finite by itself."""
    unpacked = replace(recipe, heads=replace(recipe.heads, sequence_length=0))
    for example in (example for row in rows for example in row):
        if not joint_loss(model, heads, [[example]], unpacked, 1.0).total.isfinite():
            yield example.place


def _restore(
    path: Path | None, model: Any, heads: MedusaHeads, optimizers: Optimizers, recipe: JointRecipe
) -> int:
    """Load the state at `path`. Returns the steps done, 0 without a file. Raises UsageError."""
    from peft import set_peft_model_state_dict

    saved = restore_state(path, heads, optimizers, recipe)
    if "adapter" in saved:
        set_peft_model_state_dict(model, saved["adapter"])
    return int(saved.get("step", 0))
