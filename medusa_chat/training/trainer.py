"""Training of the heads on a frozen backbone, step by step, resumable at any of them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.training.data import Batch, Example, collate, grouped
from medusa_chat.training.loss import HeadLosses, LMHead, hidden_and_targets, medusa_loss
from medusa_chat.training.muon import Muon

Optimizers = list[tuple[torch.optim.Optimizer, float]]


@dataclass(frozen=True)
class HeadRecipe:
    """Settings of a Medusa-1 run; its defaults suit heads that share the LM head.

    learning_rate: Muon's, for the residual layers; other_learning_rate: AdamW's, for biases and
    LM heads of their own. batch_tokens counts padding. cache_hidden: run the backbone once over
    everything and keep its hidden states (d values a label), then take batches of batch_labels;
    else run it at every step over batches of batch_tokens. decay: the weight of head k (from 1) is
    decay^k. evaluate_every and save_every count steps; the last step does both.
    """

    steps: int = 500
    batch_tokens: int = 4096
    batch_labels: int = 1024
    cache_hidden: bool = True
    learning_rate: float = 2e-2
    other_learning_rate: float = 2e-3
    warmup_steps: int = 20
    decay: float = 0.8
    weight_decay: float = 0.0
    clip: float = 1.0
    rows_at_once: int = 512
    evaluate_every: int = 100
    save_every: int = 100
    seed: int = 0


@dataclass(frozen=True)
class Rows:
    """Places where a head has a label: hidden [n, d], targets [n, K], owners [n] index names."""

    hidden: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]


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
    optimizers = optimizers_of(heads, recipe)
    start = _restore(state, heads, optimizers, recipe)
    source = _cached if recipe.cache_hidden else _streamed
    for step, rows in source(model, len(heads), examples, recipe, start):
        rate = rate_at(step, recipe)
        for optimizer, peak in optimizers:
            optimizer.param_groups[0]["lr"] = peak * rate
        result = _loss(lm_head, heads, rows, recipe)
        if not math.isfinite(result.total.item()):
            raise MedusaChatError(_blame(lm_head, heads, rows, recipe, step))
        result.total.backward()
        nn.utils.clip_grad_norm_(heads.parameters(), recipe.clip)
        for optimizer, _ in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        done = step + 1
        if state and (done % recipe.save_every == 0 or done == recipe.steps):
            _save(state, heads, optimizers, done, recipe)
        yield _train_step(done, recipe, result, rate * recipe.learning_rate)
        if held_out and (done % recipe.evaluate_every == 0 or done == recipe.steps):
            yield evaluate(model, lm_head, heads, held_out, recipe, done)


def optimizers_of(heads: MedusaHeads, recipe: HeadRecipe) -> Optimizers:
    """Muon for the residual layers' matrices, AdamW for everything else, each with its peak."""
    decay = recipe.weight_decay
    rest = [p for p in heads.parameters() if p is not heads.weight]
    return [
        (Muon([heads.weight], recipe.learning_rate, weight_decay=decay), recipe.learning_rate),
        (torch.optim.AdamW(rest, weight_decay=decay), recipe.other_learning_rate),
    ]


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
    batches = [rows_of(model, len(heads), collate(group)) for group in groups]
    results = [_loss(lm_head, heads, rows, recipe) for rows in batches]
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0) / labels
    return Evaluated(step, tuple(losses.tolist()), tuple(hits.tolist()))


def rows_of(model: Any, heads: int, batch: Batch) -> Rows:
    """Run the frozen backbone over a batch."""
    hidden, targets, places = hidden_and_targets(model, batch, heads)
    names = tuple(example.place for example in batch.examples)
    return Rows(hidden, targets, places, names)


def _streamed(
    model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, the backbone run at every step."""
    step = 0
    for epoch in range(recipe.steps):
        for group in grouped(examples, recipe.batch_tokens, recipe.seed + epoch):
            if step >= recipe.steps:
                return
            if step >= start:
                yield step, rows_of(model, heads, collate(group))
            step += 1


def _cached(
    model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, the backbone run once over everything."""
    names: tuple[str, ...] = ()
    parts = []
    for group in grouped(examples, recipe.batch_tokens, recipe.seed):
        rows = rows_of(model, heads, collate(group))
        parts.append((rows.hidden, rows.targets, rows.owners + len(names)))
        names += rows.names
    hidden, targets, owners = (torch.cat(column) for column in zip(*parts, strict=True))
    if not len(hidden):
        raise UsageError("the examples hold no label that a head could learn: longer answers")
    size = min(recipe.batch_labels, len(hidden))
    steps_an_epoch = len(hidden) // size
    for step in range(start, recipe.steps):
        epoch, place = divmod(step, steps_an_epoch)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(len(hidden), generator=generator).to(hidden.device)
        chosen = order[place * size : (place + 1) * size]
        yield step, Rows(hidden[chosen], targets[chosen], owners[chosen], names)


def _loss(lm_head: LMHead, heads: MedusaHeads, rows: Rows, recipe: HeadRecipe) -> HeadLosses:
    at_once = recipe.rows_at_once
    return medusa_loss(heads, lm_head, rows.hidden, rows.targets, recipe.decay, at_once)


@torch.no_grad()
def _blame(lm_head: LMHead, heads: MedusaHeads, rows: Rows, recipe: HeadRecipe, step: int) -> str:
    """Which examples have a row whose loss is not finite by itself."""
    guilty: dict[str, None] = {}
    for row in range(len(rows.hidden)):
        one = slice(row, row + 1)
        alone = Rows(rows.hidden[one], rows.targets[one], rows.owners[one], rows.names)
        if not math.isfinite(_loss(lm_head, heads, alone, recipe).total.item()):
            guilty[rows.names[int(rows.owners[row])] or "an example without a name"] = None
    names = ", ".join(list(guilty)[:3]) or "none of the batch's rows alone"
    return f"the loss is not finite at step {step + 1}: look at {names}, or lower the learning rate"


def _train_step(step: int, recipe: HeadRecipe, result: HeadLosses, rate: float) -> TrainStep:
    top1 = (result.hits / result.labels.clamp(min=1)).tolist()
    labels = int(result.labels[0])
    losses = tuple(result.losses.tolist())
    return TrainStep(step, recipe.steps, result.total.item(), losses, tuple(top1), labels, rate)


def _save(
    path: Path, heads: MedusaHeads, optimizers: Optimizers, step: int, recipe: HeadRecipe
) -> None:
    """Write the whole state beside `path`, then put it in place at once."""
    saved = {
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    partial = path.with_suffix(".part")
    torch.save(saved, partial)
    partial.replace(path)


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
