"""Medusa-1: training of the heads on a frozen backbone, resumable at any step."""

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import UsageError
from medusa_chat.training.data import Example, collate, group_by_length
from medusa_chat.training.events import Evaluated, HiddenStates, TrainStep
from medusa_chat.training.hidden_states import (
    HeadInputs,
    caching_inputs,
    draw_inputs,
    head_inputs,
    stream_inputs,
)
from medusa_chat.training.loss import IGNORED, HeadLosses, LMHead, medusa_loss, top_shares
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.training.teacher_states import TeacherStates
from medusa_chat.training.training_loop import optimizers_of, run_steps, with_evaluations
from medusa_chat.training.training_state import restore_state, save_state


def new_heads(
    lm_head: nn.Linear,
    heads: int,
    layers: int = 1,
    own_lm_head: bool = False,
    embedding: nn.Module | None = None,
) -> MedusaHeads:
    """Heads in fp32 that predict what the LM head predicts, on its device. own_lm_head: each head
    has a copy of the LM head; otherwise all share it. embedding: the backbone's, for heads that
    read the root.

    Raises UsageError for copies of an LM head with a bias: the file format cannot hold the bias.
    """
    if own_lm_head and lm_head.bias is not None:
        raise UsageError(
            "the backbone's LM head has a bias, which copies of it cannot keep: use "
            "--shared-lm-head"
        )
    vocabulary, hidden = lm_head.weight.shape
    rows, reads = vocabulary if own_lm_head else None, embedding is not None
    made = MedusaHeads(heads, hidden, layers, rows, has_root=reads)
    if embedding is not None:
        made.read_roots(embedding)
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
    cached: HeadInputs | None = None,
    short: ShortVocabulary | None = None,
    kept: TeacherStates | None = None,
) -> Iterator[HiddenStates | TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and stays frozen.

    state: file that is written every save_every steps and when the generator is closed, and from
    which a training goes on; an interrupted training gives the same heads, bit for bit on a CPU.
    Several processes give the heads of a single one that does not cache hidden states. cached: the
    examples' inputs, where the caller has run the backbone already. short: the vocabulary of the
    loss; evaluations are over all tokens. kept: see stream_inputs. Raises UsageError without
    examples, MedusaChatError naming the example when a loss is not finite.
    """
    if not examples:
        raise UsageError("there are no examples to train the heads on: give other --data")
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    optimizers = optimizers_of(heads, recipe)
    start = int(restore_state(state, heads, optimizers, recipe).get("step", 0))
    if recipe.cache_hidden and group.size == 1 and cached is None and start < recipe.steps:
        cached = yield from caching_inputs(model, len(heads), examples, recipe, lm_head)
    batches = _batches(model, lm_head, heads, examples, recipe, start, group, cached, kept)
    learnt_by = lm_head
    if short is not None:
        learnt_by, vocabulary = short.lm_head, short
        batches = ((step, vocabulary.inputs(inputs)) for step, inputs in batches)

    def save(done: int) -> None:
        if state is not None and group.is_first:
            save_state(state, heads, optimizers, done, recipe)

    steps = run_steps(
        batches,
        lambda step, inputs: _loss(learnt_by, heads, inputs, recipe, group),
        lambda step, inputs: _faulty(learnt_by, heads, inputs, recipe),
        *(list(heads.parameters()), optimizers, recipe, save, group),
    )
    evaluation = partial(evaluate, model, lm_head, heads, held_out, recipe) if held_out else None
    yield from with_evaluations(steps, recipe, evaluation)


def _batches(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    start: int,
    group: ProcessGroup,
    cached: HeadInputs | None,
    kept: TeacherStates | None,
) -> Iterator[tuple[int, HeadInputs]]:
    """(step, inputs) from step `start` on: from cached hidden states, or with a pass of the
    backbone at every step."""
    if start >= recipe.steps:
        return iter(())
    if cached is not None:
        return draw_inputs(cached, recipe, start)
    return stream_inputs(model, len(heads), examples, recipe, start, group, lm_head, kept)


@torch.no_grad()
def evaluate(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    step: int = 0,
) -> Evaluated:
    """Loss (nats) and accuracies of every head over the examples, each over its own labels."""
    groups = group_by_length(examples, recipe.batch_tokens, recipe.seed)
    batches = [head_inputs(model, len(heads), collate(group)) for group in groups]
    results = [_loss(lm_head, heads, inputs, recipe) for inputs in batches]
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0)
    return Evaluated(step, tuple(losses.tolist()), top_shares(hits, labels))


def _loss(
    lm_head: LMHead,
    heads: MedusaHeads,
    inputs: HeadInputs,
    recipe: HeadRecipe,
    group: ProcessGroup = ALONE,
) -> HeadLosses:
    labels = group.sum((inputs.targets != IGNORED).sum(0))
    tensors = inputs.hidden, inputs.roots, inputs.targets
    settings = recipe.decay, recipe.rows_at_once
    return medusa_loss(heads, lm_head, *tensors, *settings, labels, inputs.soft)


@torch.no_grad()
def _faulty(
    lm_head: LMHead, heads: MedusaHeads, inputs: HeadInputs, recipe: HeadRecipe
) -> Iterator[str]:
    """Names of the examples that have a row whose loss is not finite by itself."""
    for row in range(len(inputs.hidden)):
        alone = inputs[row : row + 1]
        if not math.isfinite(_loss(lm_head, heads, alone, recipe).total.item()):
            yield inputs.names[int(inputs.owners[row])]
