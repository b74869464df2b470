"""Medusa-1: training of the heads on a frozen backbone, resumable at any step."""

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
from medusa_chat.training.hidden_states import caching_inputs, draw_inputs, stream_batches
from medusa_chat.training.loss import (
    HeadInputs,
    LMHead,
    evaluated,
    head_inputs,
    medusa_loss,
)
from medusa_chat.training.optimizers import head_optimizers
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import HeadRecipe
from medusa_chat.training.training_loop import run_steps
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
) -> Iterator[HiddenStates | TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and stays frozen.

    state: file that is written every save_every steps and when the generator is closed, and from
    which a training goes on; an interrupted training gives the same heads, bit for bit on a CPU.
    Several processes give the heads of a single one that does not cache hidden states. cached: the
    examples' inputs, where the caller has run the backbone already. short: the vocabulary of the
    loss; evaluations are over all tokens. Raises MedusaChatError when a loss is not finite.
    """
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    optimizers = head_optimizers(heads, recipe)
    start = int(restore_state(state, heads, optimizers, recipe).get("step", 0))
    if recipe.cache_hidden and group.size == 1 and cached is None and start < recipe.steps:
        cached = yield from caching_inputs(model, len(heads), examples, recipe)
    if cached is not None:
        batches = draw_inputs(cached, recipe, start)
    else:
        streamed = stream_batches(examples, recipe, start, group)
        batches = ((step, head_inputs(model, collate(rows), len(heads))) for step, rows in streamed)
    learnt_by = lm_head
    if short is not None:
        learnt_by, columns = short.lm_head, short.columns
        batches = ((step, x._replace(targets=columns(x.targets))) for step, x in batches)

    own = state if group.is_first else None
    save = partial(save_state, own, heads, optimizers, recipe, None)
    evaluation = partial(evaluate, model, lm_head, heads, held_out, recipe) if held_out else None
    yield from run_steps(
        batches,
        lambda step, inputs: medusa_loss(heads, learnt_by, *inputs, recipe.decay, group=group),
        *(list(heads.parameters()), optimizers, recipe, save, evaluation, group),
    )


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
    batches = [head_inputs(model, collate(group), len(heads)) for group in groups]
    losses = [medusa_loss(heads, lm_head, *inputs, recipe.decay) for inputs in batches]
    return evaluated(step, losses)
