"""Training of the heads on a frozen backbone, step by step, resumable at any of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.hidden_states import (
    HeadInputs,
    cache_inputs,
    draw_inputs,
    epoch_batches,
    head_inputs,
    make_batch,
    stream_batches,
    stream_inputs,
)
from medusa_chat.training.loss import IGNORED, HeadLosses, LMHead, medusa_loss
from medusa_chat.training.optimizers import Optimizers
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.stage_recipes import Evaluated, HeadRecipe, Shares, TrainStep, shares
from medusa_chat.training.training_loop import (
    is_due,
    optimizers_of,
    rate_at,
    run_steps,
    write_state,
)

__all__ = [
    "Evaluated",
    "HeadRecipe",
    "HeadInputs",
    "Shares",
    "TrainStep",
    "make_batch",
    "run_steps",
    "epoch_batches",
    "evaluate",
    "is_due",
    "new_heads",
    "optimizers_of",
    "rate_at",
    "head_inputs",
    "shares",
    "stream_batches",
    "train_heads",
    "write_state",
]


def new_heads(
    lm_head: nn.Linear, heads: int, layers: int = 1, own_lm_head: bool = False
) -> MedusaHeads:
    """Heads in fp32 whose logits are the LM head's, sharing it or with a copy each.

    Raises UsageError for own copies of an LM head that has a bias: the format has no place for it.
    """
    if own_lm_head and lm_head.bias is not None:
        raise UsageError("the LM head has a bias, which heads of their own cannot hold: share it")
    vocabulary, hidden = lm_head.weight.shape
    made = MedusaHeads(heads, hidden, layers, vocabulary if own_lm_head else None)
    if made.lm_weight is not None:
        with torch.no_grad():
            made.lm_weight.copy_(lm_head.weight.expand_as(made.lm_weight))
    return made.to(lm_head.weight.device)


def train_heads(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    held_out: Sequence[Example] = (),
    state: Path | None = None,
    group: ProcessGroup = ALONE,
    kept: HeadInputs | None = None,
) -> Iterator[TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and left frozen.

    state: file that is written whole every save_every steps, and when the generator is closed, and
    taken up when it is there; a run that was interrupted gives the same heads, bit for bit on a
    CPU. Several processes of a team give the heads of one that does not cache. kept: the examples'
    rows, where the caller has run the backbone already. Raises MedusaChatError naming the example
    when a loss is not finite.
    """
    if not examples:
        raise UsageError("no examples to train the heads on")
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    optimizers = optimizers_of(heads, recipe)
    start = _restore(state, heads, optimizers, recipe)
    source: Iterator[tuple[int, HeadInputs]] = iter(())
    if start >= recipe.steps:
        pass
    elif recipe.cache_hidden and group.size == 1:
        kept = kept or cache_inputs(model, len(heads), examples, recipe, lm_head)
        source = draw_inputs(kept, recipe, start)
    else:
        source = stream_inputs(model, len(heads), examples, recipe, start, group, lm_head)

    def save(done: int) -> None:
        if state is not None and group.is_first:
            _save(state, heads, optimizers, done, recipe)

    for event in run_steps(
        source,
        lambda step, rows: _loss(lm_head, heads, rows, recipe, group),
        lambda step, rows: _blame(lm_head, heads, rows, recipe, step),
        list(heads.parameters()),
        optimizers,
        recipe,
        save,
        group,
    ):
        yield event
        if held_out and is_due(event.step, recipe.evaluate_every, recipe.steps):
            yield evaluate(model, lm_head, heads, held_out, recipe, event.step)


@torch.no_grad()
def evaluate(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    step: int = 0,
) -> Evaluated:
    """Loss and top-1 of every head over the examples, each over its own labels."""
    groups = group_by_length(examples, recipe.batch_tokens, recipe.seed)
    batches = [head_inputs(model, len(heads), collate(group)) for group in groups]
    results = [_loss(lm_head, heads, rows, recipe) for rows in batches]
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0)
    return Evaluated(step, tuple(losses.tolist()), shares(hits, labels))


def _loss(
    lm_head: LMHead,
    heads: MedusaHeads,
    rows: HeadInputs,
    recipe: HeadRecipe,
    group: ProcessGroup = ALONE,
) -> HeadLosses:
    labels = group.sum((rows.targets != IGNORED).sum(0))
    at_once = recipe.rows_at_once
    hidden, targets = rows.hidden, rows.targets
    return medusa_loss(heads, lm_head, hidden, targets, recipe.decay, at_once, labels, rows.soft)


@torch.no_grad()
def _blame(
    lm_head: LMHead, heads: MedusaHeads, rows: HeadInputs, recipe: HeadRecipe, step: int
) -> str:
    """Which examples have a row whose loss is not finite by itself."""
    guilty: dict[str, None] = {}
    for row in range(len(rows.hidden)):
        alone = rows[row : row + 1]
        if not math.isfinite(_loss(lm_head, heads, alone, recipe).total.item()):
            guilty[rows.names[int(rows.owners[row])] or "an example without a name"] = None
    names = ", ".join(list(guilty)[:3]) or "none of the batch's rows alone"
    return f"the loss is not finite at step {step + 1}: look at {names}, or lower the learning rate"


def _save(
    path: Path, heads: MedusaHeads, optimizers: Optimizers, step: int, recipe: HeadRecipe
) -> None:
    saved = {
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    write_state(path, saved)


def _restore(
    path: Path | None, heads: MedusaHeads, optimizers: Optimizers, recipe: HeadRecipe
) -> int:
    """Steps done by the state at `path`, which is loaded; 0 without one. Raises UsageError."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if saved["recipe"] != asdict(recipe):
        raise UsageError(f"{path} belongs to another recipe: remove it or give another file")
    heads.load_state_dict(saved["heads"])
    for (optimizer, _), values in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(values)
    return int(saved["step"])
