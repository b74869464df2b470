"""Medusa-2: the backbone, by LoRA, and its heads trained together, resumable at any step."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from math import pi, sin
from pathlib import Path
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example
from medusa_chat.training.hidden_states import stream_batches
from medusa_chat.training.joint_loss import evaluate_jointly, joint_loss, next_tokens
from medusa_chat.training.lora import adapter_tensors, add_adapter, is_tied, linear_names
from medusa_chat.training.loss import HeadLosses
from medusa_chat.training.optimizers import Optimizers, adamw
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.stage_recipes import Evaluated, JointRecipe, TrainStep
from medusa_chat.training.training_loop import is_due, optimizers_of, run_steps, write_state

__all__ = [
    "JointRecipe",
    "adapter_tensors",
    "add_adapter",
    "evaluate_jointly",
    "is_tied",
    "joint_loss",
    "linear_names",
    "next_tokens",
    "train_jointly",
    "weight_of_heads",
]


def weight_of_heads(step: int, recipe: JointRecipe) -> float:
    """lambda_0 at a step from 0."""
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
) -> Iterator[TrainStep | Evaluated]:
    """Train the adapter of `model` (see add_adapter) and `heads` in place; as train_heads."""
    if not examples:
        raise UsageError("no examples to train on")
    heads.requires_grad_(True)
    adapter = [p for p in model.parameters() if p.requires_grad]
    optimizers = [adamw(adapter, recipe.learning_rate, 0.0), *optimizers_of(heads, recipe.heads)]
    start = _restore(state, model, heads, optimizers, recipe)

    def save(done: int) -> None:
        if state is not None and group.is_first:
            write_state(
                state,
                {
                    "heads": heads.state_dict(),
                    "adapter": adapter_tensors(model),
                    "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
                    "step": done,
                    "recipe": asdict(recipe),
                },
            )

    def loss(step: int, rows: Sequence[Sequence[Example]]) -> HeadLosses:
        torch.manual_seed(recipe.heads.seed + 7919 * step + group.rank)  # for the dropout
        weight = weight_of_heads(step, recipe)
        return joint_loss(model, heads, rows, recipe, weight, group, dropout=True)

    source = stream_batches(examples, recipe.heads, start, group)
    parameters = [*adapter, *heads.parameters()]
    blame = _blame(model, heads, recipe)
    for event in run_steps(source, loss, blame, parameters, optimizers, recipe.heads, save, group):
        yield event
        if held_out and is_due(event.step, recipe.heads.evaluate_every, recipe.heads.steps):
            yield evaluate_jointly(model, heads, held_out, recipe, event.step)


def _blame(model: Any, heads: MedusaHeads, recipe: JointRecipe) -> Callable[[int, Any], str]:
    @torch.no_grad()
    def blame(step: int, rows: Sequence[Sequence[Example]]) -> str:
        """Which examples have a loss that is not finite by itself."""
        plain = replace(recipe, heads=replace(recipe.heads, sequence_length=0))
        guilty = [
            example.place or "an example without a name"
            for row in rows
            for example in row
            if not joint_loss(model, heads, [[example]], plain, 1.0).total.isfinite()
        ]
        names = ", ".join(guilty[:3]) or "none of the batch's rows alone"
        where = f"the loss is not finite at step {step + 1}"
        return f"{where}: look at {names}, or lower the learning rate"

    return blame


def _restore(
    path: Path | None, model: Any, heads: MedusaHeads, optimizers: Optimizers, recipe: JointRecipe
) -> int:
    """Steps done by the state at `path`, which is loaded; 0 without one. Raises UsageError."""
    from peft import set_peft_model_state_dict

    if path is None or not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if saved["recipe"] != asdict(recipe):
        raise UsageError(f"{path} belongs to another recipe: remove it or give another file")
    heads.load_state_dict(saved["heads"])
    set_peft_model_state_dict(model, saved["adapter"])
    for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return int(saved["step"])
