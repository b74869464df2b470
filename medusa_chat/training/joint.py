"""Medusa-2: the backbone's LoRA adapter and the heads trained together, resumable at any step."""

from collections.abc import Iterator, Sequence
from functools import partial
from math import pi, sin
from pathlib import Path
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.data import Example
from medusa_chat.training.events import Evaluated, TrainStep
from medusa_chat.training.hidden_states import stream_batches
from medusa_chat.training.joint_loss import evaluate_jointly, joint_loss
from medusa_chat.training.lora import adapter_tensors
from medusa_chat.training.loss import HeadLosses
from medusa_chat.training.optimizers import adamw, head_optimizers
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import JointRecipe
from medusa_chat.training.training_loop import run_steps
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
) -> Iterator[TrainStep | Evaluated]:
    """Train the adapter of `model` (see add_adapter) and `heads` in place. state, held_out, group,
    short and errors: as in train_heads."""
    from peft import set_peft_model_state_dict

    heads.requires_grad_(True)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizers = [adamw(adapter, recipe.learning_rate, 0.0), *head_optimizers(heads, recipe.heads)]
    saved = restore_state(state, heads, optimizers, recipe)
    if "adapter" in saved:
        set_peft_model_state_dict(model, saved["adapter"])
    start = int(saved.get("step", 0))
    own = state if group.is_first else None
    save = partial(save_state, own, heads, optimizers, recipe, partial(adapter_tensors, model))

    def loss(step: int, rows: Sequence[Example]) -> HeadLosses:
        # the dropout depends on seed, step and process alone: a resumed training repeats it
        torch.manual_seed(recipe.heads.seed + SEED_STRIDE * step + group.rank)
        weight = weight_of_heads(step, recipe)
        return joint_loss(model, heads, rows, recipe, weight, group, True, short)

    evaluation = partial(evaluate_jointly, model, heads, held_out, recipe) if held_out else None
    yield from run_steps(
        stream_batches(examples, recipe.heads, start, group),
        loss,
        *([*adapter, *heads.parameters()], optimizers, recipe.heads, save, evaluation, group),
    )
