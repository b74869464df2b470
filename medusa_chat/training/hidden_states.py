"""HeadInputs: the backbone's hidden states with the heads' targets, a batch at a time."""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from medusa_chat.errors import UsageError
from medusa_chat.training.data import (
    Batch,
    Example,
    PackedRows,
    collate,
    collate_packed,
    group_by_length,
    pack_rows,
    shuffle_rows,
)
from medusa_chat.training.events import HiddenStates
from medusa_chat.training.loss import (
    LMHead,
    SoftTargets,
    hidden_and_soft_targets,
    hidden_and_targets,
)
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.training.teacher_states import TeacherStates


@dataclass(frozen=True)
class HeadInputs:
    """The n positions at which any head has a target: hidden [n, d] in the backbone's dtype,
    roots [n] and targets [n, K]
    int64, owners [n] int64, which index `names`, the names of the examples. soft:
    distributions that are learnt instead of the targets."""

    hidden: Tensor
    roots: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]
    soft: SoftTargets | None = None

    def __getitem__(self, chosen: Any) -> "HeadInputs":
        """A part of the positions, by a slice or by indices."""
        soft = None if self.soft is None else self.soft[chosen]
        tensors = (self.hidden, self.roots, self.targets, self.owners)
        return HeadInputs(*(tensor[chosen] for tensor in tensors), self.names, soft)


def head_inputs(
    model: Any,
    heads: int,
    batch: Batch,
    soft: int = 0,
    lm_head: LMHead | None = None,
    keep: Callable[[Tensor], None] | None = None,
) -> HeadInputs:
    """Run the frozen backbone over a batch. soft: number of its most probable tokens that are kept
    for each target (0: none), by `lm_head`, or by the model's own output layer if that is None.
    keep: see hidden_and_targets; without soft targets.
    Returns hidden [n, d] in the model's dtype, roots [n] and targets [n, heads] int64, on its
    device."""
    names = tuple(example.place for example in batch.examples)
    if not soft:
        return HeadInputs(*hidden_and_targets(model, batch, heads, keep), names)
    lm_head = lm_head or model.get_output_embeddings()
    *tensors, targets = hidden_and_soft_targets(model, batch, heads, lm_head, soft)
    return HeadInputs(*tensors, names, targets)


def epoch_batches(
    examples: Sequence[Example], recipe: HeadRecipe, epoch: int
) -> list[list[list[Example]]]:
    """[batch][row][example] of an epoch. Their order depends on the seed and the epoch."""
    if not recipe.sequence_length:
        groups = group_by_length(examples, recipe.batch_tokens, recipe.seed + epoch)
        return [[[example] for example in group] for group in groups]
    rows = pack_rows(examples, recipe.sequence_length, recipe.seed)
    rows_in_batch = max(recipe.batch_tokens // recipe.sequence_length, 1)
    return shuffle_rows(rows, rows_in_batch, recipe.seed + epoch)


def make_batch(rows: PackedRows, recipe: HeadRecipe) -> Batch:
    """The rows of a batch as tensors."""
    if recipe.sequence_length:
        return collate_packed(rows)
    return collate([example for row in rows for example in row])


def stream_batches(
    examples: Sequence[Example], recipe: HeadRecipe, start: int, group: ProcessGroup
) -> Iterator[tuple[int, PackedRows]]:
    """(step, this process's rows of the batch) from step `start` on."""
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
    kept: TeacherStates | None = None,
) -> Iterator[tuple[int, HeadInputs]]:
    """(step, inputs) from step `start` on, with a pass of the backbone at every step. kept: where
    a joint stage follows that needs these passes again."""
    for step, rows in stream_batches(examples, recipe, start, group):
        if not rows:
            yield step, _no_inputs(model, heads)
            continue
        batch = make_batch(rows, recipe)
        keep = None if kept is None else kept.keeper(step, batch)
        yield step, head_inputs(model, heads, batch, recipe.soft_targets, lm_head, keep)


def _no_inputs(model: Any, heads: int) -> HeadInputs:
    """The inputs of a process that has no row of a batch: none, in the right shapes."""
    device = model.get_input_embeddings().weight.device
    hidden = torch.zeros(0, model.config.get_text_config().hidden_size, dtype=model.dtype)
    targets = torch.zeros(0, heads, dtype=torch.long, device=device)
    none = targets[:, 0]
    return HeadInputs(hidden.to(device), none, targets, none, ())


def caching_inputs(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    lm_head: LMHead | None = None,
) -> Generator[HiddenStates, None, HeadInputs]:
    """The inputs of all examples, by one pass of the backbone over each; an event a batch. Raises
    UsageError where there is no target."""
    names: tuple[str, ...] = ()
    parts: list[HeadInputs] = []
    hidden: Tensor | None = None  # of all, filled as they come: joined they were there twice
    done = tokens = count = 0
    for rows in epoch_batches(examples, recipe, 0):
        batch = make_batch(rows, recipe)
        inputs = head_inputs(model, heads, batch, recipe.soft_targets, lm_head)
        if hidden is None:
            most = sum(sum(example.is_label) for example in examples)
            hidden = inputs.hidden.new_empty(most, inputs.hidden.shape[1])
        hidden[count : count + len(inputs.hidden)] = inputs.hidden
        count += len(inputs.hidden)
        owners = inputs.owners + len(names)
        parts.append(replace(inputs, hidden=hidden[:0], owners=owners))
        names += inputs.names
        read = batch.examples
        done, tokens = done + len(read), tokens + sum(len(example.ids) for example in read)
        yield HiddenStates(done, len(examples), tokens)
    assert hidden is not None
    return _joined(hidden[:count], parts, names)


def cache_inputs(
    model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe
) -> HeadInputs:
    """See caching_inputs; without its events."""
    events = caching_inputs(model, heads, examples, recipe)
    while True:
        try:
            next(events)
        except StopIteration as end:
            found: HeadInputs = end.value
            return found


def _joined(hidden: Tensor, parts: Sequence[HeadInputs], names: tuple[str, ...]) -> HeadInputs:
    """All parts as one. hidden [n, d]: of all of them."""
    roots = torch.cat([part.roots for part in parts])
    targets = torch.cat([part.targets for part in parts])
    owners = torch.cat([part.owners for part in parts])
    if not len(hidden):
        raise UsageError("no answer is long enough to train a head on: give longer answers")
    soft = [part.soft for part in parts if part.soft is not None]
    if not soft:
        return HeadInputs(hidden, roots, targets, owners, names)
    tokens = torch.cat([one.tokens for one in soft])
    probabilities = torch.cat([one.probabilities for one in soft])
    return HeadInputs(hidden, roots, targets, owners, names, SoftTargets(tokens, probabilities))


def draw_inputs(
    cached: HeadInputs, recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, HeadInputs]]:
    """(step, inputs) from step `start` on, drawn from cached ones in a new order each epoch."""
    count = len(cached.hidden)
    size = min(recipe.batch_labels, count)
    for step in range(start, recipe.steps):
        epoch, index = divmod(step, count // size)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(count, generator=generator).to(cached.hidden.device)
        yield step, cached[order[index * size : (index + 1) * size]]
