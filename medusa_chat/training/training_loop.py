"""The optimizer steps of a training stage, whatever its loss."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import nn

from medusa_chat.errors import MedusaChatError
from medusa_chat.training.events import Evaluated, TrainStep
from medusa_chat.training.loss import HeadLosses, top_shares
from medusa_chat.training.optimizers import Optimizers, share_of_peak
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.stage_recipes import HeadRecipe

T = TypeVar("T")
CLIP = 1.0  # largest norm of the gradients


def run_steps(
    batches: Iterator[tuple[int, T]],
    loss: Callable[[int, T], HeadLosses],
    parameters: Sequence[nn.Parameter],
    optimizers: Optimizers,
    recipe: HeadRecipe,
    save: Callable[[int], None],
    evaluate: Callable[[int], Evaluated] | None,
    group: ProcessGroup,
) -> Iterator[TrainStep | Evaluated]:
    """One optimizer step for each (step, batch). save(steps done) is called when it is due, and
    when the generator is closed between two steps; evaluate(steps done) when that is due, if it is
    given. Raises MedusaChatError when the loss is not finite."""
    saved = done = 0
    try:
        for step, batch in batches:
            share = _set_learning_rates(optimizers, step, recipe)
            result = loss(step, batch)
            total = group.sum(result.total.detach().clone()).item()
            if not math.isfinite(total):
                raise MedusaChatError(
                    f"the loss is not finite at step {step + 1}: lower --learning-rate, or use "
                    "another --precision or --backbone"
                )
            result.total.backward()
            _sum_gradients(parameters, group)
            _update(parameters, optimizers)
            done = step + 1
            if is_due(done, recipe.save_every, recipe.steps):
                save(done)
                saved = done
            yield _train_step(done, recipe, result, total, share * recipe.learning_rate, group)
            if evaluate is not None and is_due(done, recipe.evaluate_every, recipe.steps):
                yield evaluate(done)
    except GeneratorExit:
        if done > saved:
            save(done)
        raise


def is_due(done: int, every: int, steps: int) -> bool:
    """Whether something is due that happens every `every` steps, and after the last step."""
    return done % every == 0 or done == steps


def _set_learning_rates(optimizers: Optimizers, step: int, recipe: HeadRecipe) -> float:
    """Returns the share of the peak learning rate."""
    share = share_of_peak(step, recipe.steps, recipe.warmup_steps)
    for optimizer, peak in optimizers:
        for param_group in optimizer.param_groups:
            param_group["lr"] = peak * share
    return share


def _sum_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> None:
    """Sum the gradients over all processes. Every process takes part in every sum, also where it
    has no gradient of its own."""
    if group.size == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        group.sum(parameter.grad)


def _update(parameters: Sequence[nn.Parameter], optimizers: Optimizers) -> None:
    nn.utils.clip_grad_norm_(parameters, CLIP)
    for optimizer, _ in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _train_step(
    step: int,
    recipe: HeadRecipe,
    result: HeadLosses,
    total: float,
    rate: float,
    group: ProcessGroup,
) -> TrainStep:
    losses = tuple(group.sum(result.losses.clone()).tolist())
    top = top_shares(group.sum(result.hits), result.labels)
    lm = None if result.lm is None else group.sum(result.lm.clone()).item()
    return TrainStep(step, recipe.steps, total, losses, top, int(result.labels[0]), rate, lm)
