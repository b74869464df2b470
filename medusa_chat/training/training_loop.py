"""descend(): the steps of a training, whatever its loss; and its state on disk."""

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, first_line
from medusa_chat.training.loss import HeadLosses
from medusa_chat.training.optimizers import Optimizers, head_optimizers, share_of_peak
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.stage_recipes import HeadRecipe, TrainStep, shares

T = TypeVar("T")


def run_steps(
    source: Iterator[tuple[int, T]],
    loss: Callable[[int, T], HeadLosses],
    blame: Callable[[int, T], str],
    parameters: Sequence[nn.Parameter],
    optimizers: Optimizers,
    recipe: HeadRecipe,
    save: Callable[[int], None],
    group: ProcessGroup = ALONE,
) -> Iterator[TrainStep]:
    """Take the steps that the source gives batches for. save(done) is called when it is due, and
    when the generator is closed between two steps; blame says whose loss is not finite."""
    saved = done = 0
    try:
        for step, batch in source:
            rate = share_of_peak(step, recipe.steps, recipe.warmup_steps)
            for optimizer, peak in optimizers:
                for param_group in optimizer.param_groups:
                    param_group["lr"] = peak * rate
            result = loss(step, batch)
            total = group.sum(result.total.detach().clone()).item()
            if not math.isfinite(total):
                raise MedusaChatError(blame(step, batch))
            result.total.backward()
            for parameter in parameters if group.size > 1 else ():
                if parameter.grad is None:  # every process must take part in every sum
                    parameter.grad = torch.zeros_like(parameter)
                group.sum(parameter.grad)
            nn.utils.clip_grad_norm_(parameters, recipe.clip)
            for optimizer, _ in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            if is_due(done, recipe.save_every, recipe.steps):
                save(done)
                saved = done
            yield _train_step(done, recipe, result, total, rate * recipe.learning_rate, group)
    except GeneratorExit:
        if done > saved:
            save(done)
        raise


def is_due(done: int, every: int, steps: int) -> bool:
    """Every so many steps, and at the last."""
    return done % every == 0 or done == steps


def optimizers_of(heads: MedusaHeads, recipe: HeadRecipe) -> Optimizers:
    """Those of the recipe, each with its peak."""
    rates = (recipe.learning_rate, recipe.other_learning_rate)
    return head_optimizers(heads, recipe.optimizer, *rates, recipe.weight_decay)


def rate_at(step: int, recipe: HeadRecipe) -> float:
    """Share of the peak learning rate at a step from 0."""
    return share_of_peak(step, recipe.steps, recipe.warmup_steps)


def _train_step(
    step: int,
    recipe: HeadRecipe,
    result: HeadLosses,
    total: float,
    rate: float,
    group: ProcessGroup,
) -> TrainStep:
    losses = tuple(group.sum(result.losses.clone()).tolist())
    top = shares(group.sum(result.hits), result.labels)
    lm = None if result.lm is None else group.sum(result.lm.clone()).item()
    return TrainStep(step, recipe.steps, total, losses, top, int(result.labels[0]), rate, lm)


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Write the whole state beside `path`, then put it in place at once. Raises MedusaChatError
    where it cannot be written; what was there stays."""
    partial = path.with_suffix(".part")
    try:
        torch.save(saved, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer says it its own way
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"the state of the training cannot be written to {path.parent} ({first_line(error)}): "
            "make room there and go on with --resume"
        ) from error
