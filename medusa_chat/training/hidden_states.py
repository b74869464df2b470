"""HeadInputs: hidden states with what the heads are to say of them, a batch at a time."""

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
    group_by_length,
    pack_rows,
    shuffle_rows,
)
from medusa_chat.training.loss import (
    LMHead,
    SoftTargets,
    hidden_and_soft_targets,
    hidden_and_targets,
)
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.stage_recipes import HeadRecipe


@dataclass(frozen=True)
class HeadInputs:
    """Places where a head has a label: hidden [n, d], targets [n, K], owners [n] index names.
    soft: what is learnt in place of the targets."""

    hidden: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]
    soft: SoftTargets | None = None

    def __getitem__(self, chosen: Any) -> "HeadInputs":
        """Some of them, by a slice or by indices."""
        soft = None if self.soft is None else self.soft[chosen]
        part = (self.hidden[chosen], self.targets[chosen], self.owners[chosen])
        return HeadInputs(*part, self.names, soft)


def head_inputs(
    model: Any, heads: int, batch: Batch, soft: int = 0, lm_head: LMHead | None = None
) -> HeadInputs:
    """Run the frozen backbone over a batch. soft: how many of its own most probable tokens are
    kept for each target; lm_head: with which, the model's own output layer if None."""
    names = tuple(example.place for example in batch.examples)
    if not soft:
        hidden, targets, places = hidden_and_targets(model, batch, heads)
        return HeadInputs(hidden, targets, places, names)
    head = lm_head or model.get_output_embeddings()
    hidden, targets, places, told = hidden_and_soft_targets(model, batch, heads, head, soft)
    return HeadInputs(hidden, targets, places, names, told)


def epoch_batches(
    examples: Sequence[Example], recipe: HeadRecipe, epoch: int
) -> list[list[list[Example]]]:
    """The batches of an epoch: of rows, of examples."""
    if not recipe.sequence_length:
        groups = group_by_length(examples, recipe.batch_tokens, recipe.seed + epoch)
        return [[[example] for example in group] for group in groups]
    rows = pack_rows(examples, recipe.sequence_length, recipe.seed)
    at_once = max(recipe.batch_tokens // recipe.sequence_length, 1)
    return shuffle_rows(rows, at_once, recipe.seed + epoch)


def make_batch(rows: Sequence[Sequence[Example]], recipe: HeadRecipe) -> Batch:
    """The rows of a batch as tensors."""
    if recipe.sequence_length:
        return collate_packed(rows)
    return collate([example for row in rows for example in row])


def stream_batches(
    examples: Sequence[Example], recipe: HeadRecipe, start: int, group: ProcessGroup
) -> Iterator[tuple[int, Sequence[Sequence[Example]]]]:
    """(step, this process' rows of its batch) from step `start` on."""
    step = 0
    for epoch in range(recipe.steps):
        for rows in epoch_batches(examples, recipe, epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                yield step, group.share(rows)
            step += 1


def stream_inputs(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    start: int,
    group: ProcessGroup,
    lm_head: LMHead | None = None,
) -> Iterator[tuple[int, HeadInputs]]:
    """(step, rows) from step `start` on, the backbone run at every step."""
    for step, rows in stream_batches(examples, recipe, start, group):
        if not rows:
            yield step, _no_rows(model, heads)
            continue
        batch = make_batch(rows, recipe)
        yield step, head_inputs(model, heads, batch, recipe.soft_targets, lm_head)


def _no_rows(model: Any, heads: int) -> HeadInputs:
    """For the process of a team that a batch has no row for."""
    device = model.get_input_embeddings().weight.device
    hidden = torch.zeros(0, model.config.get_text_config().hidden_size, dtype=model.dtype)
    targets = torch.zeros(0, heads, dtype=torch.long, device=device)
    return HeadInputs(hidden.to(device), targets, targets[:, 0], ())


def cache_inputs(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    lm_head: LMHead | None = None,
) -> HeadInputs:
    """Every row of the examples, the backbone run once. Raises UsageError without any."""
    names: tuple[str, ...] = ()
    parts: list[HeadInputs] = []
    for group in epoch_batches(examples, recipe, 0):
        rows = head_inputs(model, heads, make_batch(group, recipe), recipe.soft_targets, lm_head)
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
        return HeadInputs(hidden, targets, owners, names)
    soft = SoftTargets(
        torch.cat([one.tokens for one in told]), torch.cat([one.shares for one in told])
    )
    return HeadInputs(hidden, targets, owners, names, soft)


def draw_inputs(
    kept: HeadInputs, recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, HeadInputs]]:
    """(step, rows) from step `start` on, of kept rows in a new order each epoch."""
    count = len(kept.hidden)
    size = min(recipe.batch_labels, count)
    for step in range(start, recipe.steps):
        epoch, place = divmod(step, count // size)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(count, generator=generator).to(kept.hidden.device)
        yield step, kept[order[place * size : (place + 1) * size]]
