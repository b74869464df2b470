"""The inputs of the heads' training, a batch at a time: streamed, or kept and drawn."""

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.events import HiddenStates
from medusa_chat.training.loss import HeadInputs, head_inputs
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.stage_recipes import HeadRecipe


def stream_batches(
    examples: Sequence[Example], recipe: HeadRecipe, start: int, group: ProcessGroup
) -> Iterator[tuple[int, Sequence[Example]]]:
    """(step, this process's rows of the batch) from step `start` on. A process without any runs the
    first one without its labels, so that it has its part in every sum."""
    step = 0
    for epoch in range(recipe.steps if start < recipe.steps else 0):
        for rows in group_by_length(examples, recipe.batch_tokens, recipe.seed + epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                own = group.share(rows)
                yield step, own or [replace(rows[0], is_label=(False,) * len(rows[0].ids))]
            step += 1


def caching_inputs(
    model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe
) -> Generator[HiddenStates, None, HeadInputs]:
    """The inputs of all examples, by one pass of the backbone over each; an event a batch. Raises
    UsageError where there is no target."""
    roots: list[Tensor] = []
    targets: list[Tensor] = []
    hidden: Tensor | None = None  # of all, filled as they come: joined they were there twice
    done = tokens = count = 0
    for rows in group_by_length(examples, recipe.batch_tokens, recipe.seed):
        inputs = head_inputs(model, collate(rows), heads)
        if hidden is None:
            most = sum(sum(example.is_label) for example in examples)
            hidden = inputs.hidden.new_empty(most, inputs.hidden.shape[1])
        hidden[count : count + len(inputs.hidden)] = inputs.hidden
        count += len(inputs.hidden)
        roots.append(inputs.roots)
        targets.append(inputs.targets)
        done, tokens = done + len(rows), tokens + sum(len(example.ids) for example in rows)
        yield HiddenStates(done, len(examples), tokens)
    assert hidden is not None
    if not count:
        raise UsageError("no answer is long enough to train a head on: give longer answers")
    return HeadInputs(hidden[:count], torch.cat(roots), torch.cat(targets))


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
        yield step, cached.part(order[index * size : (index + 1) * size])
