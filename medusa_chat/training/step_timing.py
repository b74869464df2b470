"""The time of one batch of each stage of a training, which leaves model and heads as they were."""

from collections.abc import Sequence
from time import perf_counter
from typing import Any

import torch

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.data import Example
from medusa_chat.training.hidden_states import epoch_batches, head_inputs, make_batch
from medusa_chat.training.joint_loss import joint_loss
from medusa_chat.training.lora import add_adapter
from medusa_chat.training.loss import LMHead, medusa_loss
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.stage_recipes import HeadRecipe, JointRecipe


def batch_seconds(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: HeadRecipe,
    short: ShortVocabulary | None = None,
) -> tuple[float, float]:
    """Seconds of one batch: (the backbone's forward pass, the heads' forward and backward). short:
    the vocabulary of the loss."""
    batch = make_batch(epoch_batches(examples, recipe, 0)[0], recipe)
    device = heads.weight.device
    rows = head_inputs(model, len(heads), batch)  # once for whatever a first call does besides
    _synchronise(device)
    start = perf_counter()
    rows = head_inputs(model, len(heads), batch)
    _synchronise(device)
    middle = perf_counter()
    rows = rows[: recipe.batch_labels] if recipe.cache_hidden else rows
    rows = rows if short is None else short.inputs(rows)
    lm_head = lm_head if short is None else short.lm_head
    tensors = rows.hidden, rows.roots, rows.targets
    result = medusa_loss(heads, lm_head, *tensors, 1.0, recipe.rows_at_once)
    result.total.backward()
    heads.zero_grad(set_to_none=True)
    _synchronise(device)
    return middle - start, perf_counter() - middle


def joint_batch_seconds(
    model: Any,
    heads: MedusaHeads,
    examples: Sequence[Example],
    recipe: JointRecipe,
    short: ShortVocabulary | None = None,
) -> float:
    """Seconds of a batch of backbone and heads: the passes forwards and backwards with an adapter,
    which is taken off again, the teacher's pass, and both losses. short: as in joint_loss."""
    rows = epoch_batches(examples, recipe.heads, 0)[0]
    device = heads.weight.device
    trained = [p.requires_grad for p in heads.parameters()]
    wrapped, _ = add_adapter(model, recipe)
    try:
        heads.requires_grad_(True)
        _synchronise(device)
        start = perf_counter()
        loss = joint_loss(wrapped, heads, rows, recipe, recipe.lambda0, dropout=True, short=short)
        loss.total.backward()
        _synchronise(device)
        return perf_counter() - start
    finally:
        heads.zero_grad(set_to_none=True)
        for parameter, was in zip(heads.parameters(), trained, strict=True):
            parameter.requires_grad_(was)
        wrapped.unload()
        model.eval()


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
