"""Rows: hidden states with what the heads are to say of them, a batch at a time."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
from medusa_chat.training.head_recipe import HeadRecipe
from medusa_chat.training.loss import LMHead, Soft, hidden_and_soft, hidden_and_targets
from medusa_chat.training.process_group import ProcessGroup


@dataclass(frozen=True)
class Rows:
    """Places where a head has a label: hidden [n, d], targets [n, K], owners [n] index names.
    soft: what is learnt in place of the targets."""

    hidden: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]
    soft: Soft | None = None

    def __getitem__(self, chosen: Any) -> "Rows":
        """Some of them, by a slice or by indices."""
        soft = None if self.soft is None else self.soft[chosen]
        part = (self.hidden[chosen], self.targets[chosen], self.owners[chosen])
        return Rows(*part, self.names, soft)


def rows_of(
    model: Any, heads: int, batch: Batch, soft: int = 0, lm_head: LMHead | None = None
) -> Rows:
    """Run the frozen backbone over a batch. soft: how many of its own most probable tokens are
    kept for each target; lm_head: with which, the model's own output layer if None."""
    names = tuple(example.place for example in batch.examples)
    if not soft:
        hidden, targets, places = hidden_and_targets(model, batch, heads)
        return Rows(hidden, targets, places, names)
    head = lm_head or model.get_output_embeddings()
    hidden, targets, places, told = hidden_and_soft(model, batch, heads, head, soft)
    return Rows(hidden, targets, places, names, told)


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
    examples: Sequence[Example], recipe: HeadRecipe, start: int, team: ProcessGroup
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
    team: ProcessGroup,
    lm_head: LMHead | None = None,
) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, the backbone run at every step."""
    for step, rows in streamed(examples, recipe, start, team):
        if not rows:
            yield step, _no_rows(model, heads)
            continue
        batch = batch_of(rows, recipe)
        yield step, rows_of(model, heads, batch, recipe.soft_targets, lm_head)


def _no_rows(model: Any, heads: int) -> Rows:
    """For the process of a team that a batch has no row for."""
    device = model.get_input_embeddings().weight.device
    hidden = torch.zeros(0, model.config.get_text_config().hidden_size, dtype=model.dtype)
    targets = torch.zeros(0, heads, dtype=torch.long, device=device)
    return Rows(hidden.to(device), targets, targets[:, 0], ())


def keep_rows(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    lm_head: LMHead | None = None,
) -> Rows:
    """Every row of the examples, the backbone run once. Raises UsageError without any."""
    names: tuple[str, ...] = ()
    parts: list[Rows] = []
    for group in epoch_of(examples, recipe, 0):
        rows = rows_of(model, heads, batch_of(group, recipe), recipe.soft_targets, lm_head)
        parts.append(replace(rows, owners=rows.owners + len(names)))
        names += rows.names
    hidden, targets, owners = (
        torch.cat([getattr(part, name) for part in parts])
        for name in ("hidden", "targets", "owners")
    )
    if not len(hidden):
        raise UsageError("the examples hold no label that a head could learn: longer answers")
    told = [part.soft for part in parts if part.soft is not None]
    if not told:
        return Rows(hidden, targets, owners, names)
    soft = Soft(torch.cat([one.tokens for one in told]), torch.cat([one.shares for one in told]))
    return Rows(hidden, targets, owners, names, soft)


def drawn_rows(kept: Rows, recipe: HeadRecipe, start: int) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, of kept rows in a new order each epoch."""
    count = len(kept.hidden)
    size = min(recipe.batch_labels, count)
    for step in range(start, recipe.steps):
        epoch, place = divmod(step, count // size)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(count, generator=generator).to(kept.hidden.device)
        yield step, kept[order[place * size : (place + 1) * size]]
