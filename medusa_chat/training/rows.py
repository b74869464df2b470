"""Rows: hidden states with what the heads are to say of them, a batch at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.errors import UsageError
from medusa_chat.training.data import (
    Batch,
    Example,
    collate,
    collate_packed,
    grouped,
    packed,
    shuffled,
)
from medusa_chat.training.loss import hidden_and_targets
from medusa_chat.training.steps import HeadRecipe
from medusa_chat.training.team import Team


@dataclass(frozen=True)
class Rows:
    """Places where a head has a label: hidden [n, d], targets [n, K], owners [n] index names."""

    hidden: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]


def rows_of(model: Any, heads: int, batch: Batch) -> Rows:
    """Run the frozen backbone over a batch."""
    hidden, targets, places = hidden_and_targets(model, batch, heads)
    names = tuple(example.place for example in batch.examples)
    return Rows(hidden, targets, places, names)


def epoch_of(
    examples: Sequence[Example], recipe: HeadRecipe, epoch: int
) -> list[list[list[Example]]]:
    """The batches of an epoch: of rows, of examples."""
    if not recipe.sequence_length:
        groups = grouped(examples, recipe.batch_tokens, recipe.seed + epoch)
        return [[[example] for example in group] for group in groups]
    rows = packed(examples, recipe.sequence_length, recipe.seed)
    at_once = max(recipe.batch_tokens // recipe.sequence_length, 1)
    return shuffled(rows, at_once, recipe.seed + epoch)


def batch_of(rows: Sequence[Sequence[Example]], recipe: HeadRecipe) -> Batch:
    """The rows of a batch as tensors."""
    if recipe.sequence_length:
        return collate_packed(rows)
    return collate([example for row in rows for example in row])


def streamed(
    examples: Sequence[Example], recipe: HeadRecipe, start: int, team: Team
) -> Iterator[tuple[int, Sequence[Sequence[Example]]]]:
    """(step, this process' rows of its batch) from step `start` on."""
    step = 0
    for epoch in range(recipe.steps):
        for rows in epoch_of(examples, recipe, epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                yield step, team.share(rows)
            step += 1


def streamed_rows(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    start: int,
    team: Team,
) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, the backbone run at every step."""
    for step, rows in streamed(examples, recipe, start, team):
        yield (
            step,
            rows_of(model, heads, batch_of(rows, recipe)) if rows else _no_rows(model, heads),
        )


def _no_rows(model: Any, heads: int) -> Rows:
    """For the process of a team that a batch has no row for."""
    device = model.get_input_embeddings().weight.device
    hidden = torch.zeros(0, model.config.get_text_config().hidden_size, dtype=model.dtype)
    targets = torch.zeros(0, heads, dtype=torch.long, device=device)
    return Rows(hidden.to(device), targets, targets[:, 0], ())


def keep_rows(model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe) -> Rows:
    """Every row of the examples, the backbone run once. Raises UsageError without any."""
    names: tuple[str, ...] = ()
    parts = []
    for group in epoch_of(examples, recipe, 0):
        rows = rows_of(model, heads, batch_of(group, recipe))
        parts.append((rows.hidden, rows.targets, rows.owners + len(names)))
        names += rows.names
    hidden, targets, owners = (torch.cat(column) for column in zip(*parts, strict=True))
    if not len(hidden):
        raise UsageError("the examples hold no label that a head could learn: longer answers")
    return Rows(hidden, targets, owners, names)


def drawn_rows(kept: Rows, recipe: HeadRecipe, start: int) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, of kept rows in a new order each epoch."""
    hidden, targets, owners = kept.hidden, kept.targets, kept.owners
    size = min(recipe.batch_labels, len(hidden))
    steps_an_epoch = len(hidden) // size
    for step in range(start, recipe.steps):
        epoch, place = divmod(step, steps_an_epoch)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(len(hidden), generator=generator).to(hidden.device)
        chosen = order[place * size : (place + 1) * size]
        yield step, Rows(hidden[chosen], targets[chosen], owners[chosen], kept.names)
