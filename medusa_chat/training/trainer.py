"""Training of the heads on a frozen backbone, step by step, resumable at any of them."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.data import (
    Batch,
    Example,
    collate,
    collate_packed,
    grouped,
    packed,
    shuffled,
)
from medusa_chat.training.loss import (
    IGNORED,
    HeadLosses,
    LMHead,
    hidden_and_targets,
    medusa_loss,
)
from medusa_chat.training.optimizers import Optimizers, head_optimizers, share_of_peak
from medusa_chat.training.team import ALONE, Team

T = TypeVar("T")
Shares = tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class HeadRecipe:
    """Settings of a Medusa-1 run; its defaults suit heads that share the LM head.

    optimizer: "muon" with learning_rate for the residual layers and AdamW with other_learning_rate
    for biases and LM heads of their own, or "adamw" with learning_rate for all. batch_tokens counts
    padding. sequence_length: pack the examples into rows of that many ids (0: a row each, like
    lengths together). cache_hidden: run the backbone once over everything and keep its hidden
    states (d values a label), then take batches of batch_labels; else run it at every step over
    batches of batch_tokens. decay: the weight of head k (from 1) is decay^k. evaluate_every and
    save_every count steps; the last step does both.
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
    optimizer: str = "muon"
    sequence_length: int = 0


@dataclass(frozen=True)
class Rows:
    """Places where a head has a label: hidden [n, d], targets [n, K], owners [n] index names."""

    hidden: Tensor
    targets: Tensor
    owners: Tensor
    names: tuple[str, ...]


@dataclass(frozen=True)
class TrainStep:
    """One step done. Per head: losses, and top: how often the token was among its first 1 to 5
    predictions. lm_loss: the backbone's own, where that is trained as well."""

    step: int
    steps: int
    loss: float
    losses: tuple[float, ...]
    top: Shares
    labels: int
    learning_rate: float
    lm_loss: float | None = None

    @property
    def top1(self) -> tuple[float, ...]:
        """Share of labels that each head predicts right."""
        return tuple(row[0] for row in self.top)


@dataclass(frozen=True)
class Evaluated:
    """The held-out examples after `step` steps, per head as in TrainStep."""

    step: int
    losses: tuple[float, ...]
    top: Shares
    lm_loss: float | None = None

    @property
    def top1(self) -> tuple[float, ...]:
        """Share of labels that each head predicts right."""
        return tuple(row[0] for row in self.top)


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
    team: Team = ALONE,
) -> Iterator[TrainStep | Evaluated]:
    """Train `heads` in place to recipe.steps; the backbone is frozen and left frozen.

    state: file that is written whole every save_every steps, and when the generator is closed, and
    taken up when it is there; a run that was interrupted gives the same heads, bit for bit on a
    CPU. Several processes of a team give the heads of one that does not cache. Raises
    MedusaChatError naming the example when a loss is not finite.
    """
    if not examples:
        raise UsageError("no examples to train the heads on")
    model.requires_grad_(False).eval()
    heads.requires_grad_(True)
    optimizers = optimizers_of(heads, recipe)
    start = _restore(state, heads, optimizers, recipe)
    source: Iterator[tuple[int, Rows]] = iter(())
    if start >= recipe.steps:
        pass
    elif recipe.cache_hidden and team.size == 1:
        source = _cached(model, len(heads), examples, recipe, start)
    else:
        source = _streamed(model, len(heads), examples, recipe, start, team)

    def save(done: int) -> None:
        if state is not None and team.is_first:
            _save(state, heads, optimizers, done, recipe)

    for event in descend(
        source,
        lambda step, rows: _loss(lm_head, heads, rows, recipe, team),
        lambda step, rows: _blame(lm_head, heads, rows, recipe, step),
        list(heads.parameters()),
        optimizers,
        recipe,
        save,
        team,
    ):
        yield event
        if held_out and is_due(event.step, recipe.evaluate_every, recipe.steps):
            yield evaluate(model, lm_head, heads, held_out, recipe, event.step)


def descend(
    source: Iterator[tuple[int, T]],
    loss: Callable[[int, T], HeadLosses],
    blame: Callable[[int, T], str],
    parameters: Sequence[nn.Parameter],
    optimizers: Optimizers,
    recipe: HeadRecipe,
    save: Callable[[int], None],
    team: Team = ALONE,
) -> Iterator[TrainStep]:
    """Take the steps that the source gives batches for. save(done) is called when it is due, and
    when the generator is closed between two steps; blame says whose loss is not finite."""
    saved = done = 0
    try:
        for step, batch in source:
            rate = share_of_peak(step, recipe.steps, recipe.warmup_steps)
            for optimizer, peak in optimizers:
                for group in optimizer.param_groups:
                    group["lr"] = peak * rate
            result = loss(step, batch)
            total = team.sum(result.total.detach().clone()).item()
            if not math.isfinite(total):
                raise MedusaChatError(blame(step, batch))
            result.total.backward()
            for parameter in parameters if team.size > 1 else ():
                if parameter.grad is None:  # every process must take part in every sum
                    parameter.grad = torch.zeros_like(parameter)
                team.sum(parameter.grad)
            nn.utils.clip_grad_norm_(parameters, recipe.clip)
            for optimizer, _ in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            done = step + 1
            if is_due(done, recipe.save_every, recipe.steps):
                save(done)
                saved = done
            yield _train_step(done, recipe, result, total, rate * recipe.learning_rate, team)
    except GeneratorExit:
        if done > saved:
            save(done)
        raise


def is_due(done: int, every: int, steps: int) -> bool:
    """Every so many steps, and at the last."""
    return done % every == 0 or done == steps


def optimizers_of(heads: MedusaHeads, recipe: HeadRecipe) -> Optimizers:
    """Those of the recipe, each with its peak."""
    rates = (recipe.learning_rate, recipe.other_learning_rate)
    return head_optimizers(heads, recipe.optimizer, *rates, recipe.weight_decay)


def rate_at(step: int, recipe: HeadRecipe) -> float:
    """Share of the peak learning rate at a step from 0."""
    return share_of_peak(step, recipe.steps, recipe.warmup_steps)


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
    hits = torch.stack([r.hits for r in results]).sum(0)
    return Evaluated(step, tuple(losses.tolist()), shares(hits, labels))


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


def _streamed(
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


def _cached(
    model: Any, heads: int, examples: Sequence[Example], recipe: HeadRecipe, start: int
) -> Iterator[tuple[int, Rows]]:
    """(step, rows) from step `start` on, the backbone run once over everything."""
    names: tuple[str, ...] = ()
    parts = []
    for group in epoch_of(examples, recipe, 0):
        rows = rows_of(model, heads, batch_of(group, recipe))
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


def _loss(
    lm_head: LMHead, heads: MedusaHeads, rows: Rows, recipe: HeadRecipe, team: Team = ALONE
) -> HeadLosses:
    labels = team.sum((rows.targets != IGNORED).sum(0))
    at_once = recipe.rows_at_once
    return medusa_loss(heads, lm_head, rows.hidden, rows.targets, recipe.decay, at_once, labels)


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


def _train_step(
    step: int, recipe: HeadRecipe, result: HeadLosses, total: float, rate: float, team: Team
) -> TrainStep:
    losses = tuple(team.sum(result.losses.clone()).tolist())
    top = shares(team.sum(result.hits), result.labels)
    lm = None if result.lm is None else team.sum(result.lm.clone()).item()
    return TrainStep(step, recipe.steps, total, losses, top, int(result.labels[0]), rate, lm)


def shares(hits: Tensor, labels: Tensor) -> Shares:
    """hits [K, R] of each rank alone, labels [K] -> how often the token was among the first."""
    found = hits.cumsum(-1) / labels.clamp(min=1).unsqueeze(-1)
    return tuple(tuple(row) for row in found.tolist())


def _save(
    path: Path, heads: MedusaHeads, optimizers: Optimizers, step: int, recipe: HeadRecipe
) -> None:
    saved = {
        "heads": heads.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer, _ in optimizers],
        "step": step,
        "recipe": asdict(recipe),
    }
    write_state(path, saved)


def write_state(path: Path, saved: dict[str, Any]) -> None:
    """Write the whole state beside `path`, then put it in place at once. Raises MedusaChatError
    where it cannot be written; what was there stays."""
    partial = path.with_suffix(".part")
    try:
        torch.save(saved, partial)
        partial.replace(path)
    except (OSError, RuntimeError) as error:  # torch's writer says it its own way
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"the state of the training cannot be written to {path.parent} ({first_line(error)}): "
            "make room there and go on with --resume"
        ) from error


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
