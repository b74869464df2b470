"""Training of the heads on a frozen backbone, step by step, resumable at any of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.training.data import Batch, Example, collate, grouped
from medusa_chat.training.loss import HeadLosses, LMHead, hidden_and_targets, medusa_loss


@dataclass(frozen=True)
class HeadRecipe:
    """Settings of a Medusa-1 run; its defaults suit heads that share the LM head.

    batch_tokens counts padding. decay: the weight of head k (from 1) is decay^k. evaluate_every
    and save_every count steps; the last step does both.
    """

    steps: int = 500
    batch_tokens: int = 4096
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay: float = 0.8
    weight_decay: float = 0.0
    clip: float = 1.0
    rows_at_once: int = 512
    evaluate_every: int = 100
    save_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class TrainStep:
    """One step done. losses, top1: per head, top1 the share of labels predicted right."""

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    top1: tuple[float, ...]
    labels: int
    learning_rate: float


@dataclass(frozen=True)
class Evaluated:
    """The held-out examples after `step` steps, per head."""

    step: int
    losses: tuple[float, ...]
    top1: tuple[float, ...]


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
) -> Iterator[TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and left frozen.

    state: file that is written whole every save_every steps and taken up when it is there; a run
    that was interrupted gives the same heads, bit for bit on a CPU. Raises MedusaChatError naming
    the example when a loss is not finite.
    """
    if not examples:
        raise UsageError("no examples to train the heads on")
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    optimizer = torch.optim.AdamW(heads.parameters(), weight_decay=recipe.weight_decay)
    start = _restore(state, heads, optimizer, recipe)
    for step, batch in _stream(examples, recipe, start):
        rate = recipe.learning_rate * rate_at(step, recipe)
        optimizer.param_groups[0]["lr"] = rate
        result = _loss(model, lm_head, heads, batch, recipe)
        if not math.isfinite(result.total.item()):
            raise MedusaChatError(_blame(model, lm_head, heads, batch, recipe, step))
        result.total.backward()
        nn.utils.clip_grad_norm_(heads.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if state and (done % recipe.save_every == 0 or done == recipe.steps):
            _save(state, heads, optimizer, done, recipe)
        yield _train_step(done, recipe, result, rate)
        if held_out and (done % recipe.evaluate_every == 0 or done == recipe.steps):
            yield evaluate(model, lm_head, heads, held_out, recipe, done)


def rate_at(step: int, recipe: HeadRecipe) -> float:
    """Share of the peak learning rate at a step from 0: linear warmup, then half a cosine to 0."""
    if step < recipe.warmup_steps:
        return (step + 1) / recipe.warmup_steps
    progress = (step - recipe.warmup_steps) / max(recipe.steps - recipe.warmup_steps, 1)
    return 0.5 * (1 + math.cos(math.pi * progress))


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
    groups = grouped(examples, recipe.batch_tokens, recipe.seed)
    results = [_loss(model, lm_head, heads, collate(group), recipe) for group in groups]
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0) / labels
    return Evaluated(step, tuple(losses.tolist()), tuple(hits.tolist()))


def _stream(
    examples: Sequence[Example], recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, Batch]]:
    """(step, batch) from step `start` to the last, every epoch in an order of its own."""
    step = 0
    for epoch in range(recipe.steps):
        for group in grouped(examples, recipe.batch_tokens, recipe.seed + epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                yield step, collate(group)
            step += 1


def _loss(
    model: Any, lm_head: LMHead, heads: MedusaHeads, batch: Batch, recipe: HeadRecipe
) -> HeadLosses:
    hidden, targets = hidden_and_targets(model, batch, len(heads))
    return medusa_loss(heads, lm_head, hidden, targets, recipe.decay, recipe.rows_at_once)


@torch.no_grad()
def _blame(
    model: Any,
    lm_head: LMHead,
    heads: MedusaHeads,
    batch: Batch,
    recipe: HeadRecipe,
    step: int,
) -> str:
    """Which examples of the batch have a loss that is not finite on their own."""
    guilty = [
        example.place or "an example without a name"
        for example in batch.examples
        if not math.isfinite(_loss(model, lm_head, heads, collate([example]), recipe).total.item())
    ]
    names = ", ".join(guilty[:3]) or "none of the batch's rows alone"
    return f"the loss is not finite at step {step + 1}: look at {names}, or lower the learning rate"


def _train_step(step: int, recipe: HeadRecipe, result: HeadLosses, rate: float) -> TrainStep:
    top1 = (result.hits / result.labels.clamp(min=1)).tolist()
    labels = int(result.labels[0])
    losses = tuple(result.losses.tolist())
    return TrainStep(step, recipe.steps, result.total.item(), losses, tuple(top1), labels, rate)


def _save(
    path: Path, heads: MedusaHeads, optimizer: torch.optim.Optimizer, step: int, recipe: HeadRecipe
) -> None:
    """Write the whole state beside `path`, then put it in place at once."""
    saved = {
        "heads": heads.state_dict(),
        "optimizer": optimizer.state_dict(),
        "step": step,
        "recipe": asdict(recipe),
    }
    partial = path.with_suffix(".part")
    torch.save(saved, partial)
    partial.replace(path)


def _restore(
    path: Path | None, heads: MedusaHeads, optimizer: torch.optim.Optimizer, recipe: HeadRecipe
) -> int:
    """Steps done by the state at `path`, which is loaded; 0 without one. Raises UsageError."""
    if path is None or not path.exists():
        return 0
    saved = torch.load(path, weights_only=True, map_location=heads.weight.device)
    if saved["recipe"] != asdict(recipe):
        raise UsageError(f"{path} belongs to another recipe: remove it or give another file")
    heads.load_state_dict(saved["heads"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"])
