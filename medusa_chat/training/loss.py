"""The loss of the heads on the backbone's hidden states (Medusa-1), and its inputs.

The inputs are the positions at which a head has a token to predict. The loss may be over a short
vocabulary, and the logits of all rows never exist at once.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from medusa_chat import paths
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.training.events import Evaluated, HiddenStates, TopShares
from medusa_chat.training.examples import Batch, Example, collate, group_by_length
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import Recipe

IGNORED = -100  # a target where a head has no label
RANKS = 5  # predictions of a head that are counted while it learns
ROWS_AT_ONCE = 512  # whose logits exist at a time
LMHead = Callable[[Tensor], Tensor]


# ---------------------------------------------------------------------------------------- inputs


class HeadInputs(NamedTuple):
    """The n positions at which any head has a target: hidden [n, d] in the backbone's dtype,
    roots [n] and targets [n, K] int64."""

    hidden: Tensor
    roots: Tensor
    targets: Tensor

    def part(self, chosen: Tensor) -> "HeadInputs":
        """The positions at these indices int64 [m]."""
        return HeadInputs(*(tensor[chosen] for tensor in self))


def head_targets(ids: Tensor, is_label: Tensor, heads: int) -> Tensor:
    """ids [b, t] int64, is_label [b, t] bool -> [b, t, K] int64: the token that each head is to
    predict, or IGNORED.

    Head k (from 0) at t predicts the token at t + k + 2, and only where every token from t + 1 to
    there is a label: a head is used at such positions alone, and no answer crosses a turn.
    """
    targets = ids.new_full((*ids.shape, heads), IGNORED)
    unbroken = is_label[:, 1:]
    for head in range(min(heads, ids.shape[1] - 2)):
        unbroken = unbroken[:, :-1] & is_label[:, head + 2 :]
        wanted = ids[:, head + 2 :].masked_fill(~unbroken, IGNORED)
        targets[:, : wanted.shape[1], head] = wanted
    return targets


def run_decoder(model: Any, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] after the final norm, in the model's dtype."""
    ids = batch.ids.to(model.device)
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def head_inputs(model: Any, batch: Batch, heads: int) -> HeadInputs:
    """Run the frozen backbone over a batch -> the inputs, on its device."""
    device = model.device
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
    chosen = (targets != IGNORED).any(-1)
    # indexing outside inference mode copies, so autograd may keep the result
    roots = batch.next_ids.to(device)[chosen]
    return HeadInputs(hidden[chosen], roots, targets[chosen])


def caching_inputs(
    model: Any,
    heads: int,
    examples: Sequence[Example],
    recipe: Recipe,
    file: Path | None = None,
) -> Generator[HiddenStates, None, HeadInputs]:
    """The inputs of all examples, by one pass of the backbone over each; an event a batch. file:
    where they are kept for a training that is resumed, which reads them there. Raises UsageError
    where there is no target, MedusaChatError where the file cannot be written."""
    if file is not None and file.exists():
        device = model.device
        return HeadInputs(**{name: one.to(device) for name, one in load_file(file).items()})
    roots, targets = list[Tensor](), list[Tensor]()
    hidden: Tensor | None = None  # filled as they come: to join them takes them twice
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
    inputs = HeadInputs(hidden[:count], torch.cat(roots), torch.cat(targets))
    if file is not None:
        keep_inputs(inputs, file)
    return inputs


def keep_inputs(inputs: HeadInputs, file: Path) -> None:
    """Write the inputs to a file, whole or not at all. Raises MedusaChatError."""
    partial = file.with_suffix(".part")
    try:
        save_file({name: one.cpu() for name, one in inputs._asdict().items()}, partial)
        paths.replace(partial, file)
    except (OSError, SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise MedusaChatError(
            f"cannot write the hidden states to {file.parent} ({first_line(error)}): free some "
            "disk space and start again, with --resume if the training had begun"
        ) from error


def cache_inputs(model: Any, heads: int, examples: Sequence[Example], recipe: Recipe) -> HeadInputs:
    """See caching_inputs; without its events."""
    events = caching_inputs(model, heads, examples, recipe)
    while True:
        try:
            next(events)
        except StopIteration as end:
            inputs: HeadInputs = end.value
            return inputs


def draw_inputs(cached: HeadInputs, recipe: Recipe, start: int) -> Iterator[tuple[int, HeadInputs]]:
    """(step, inputs) from step `start` on, drawn from cached ones in a new order each epoch."""
    count = len(cached.hidden)
    size = min(recipe.batch_labels, count)
    for step in range(start, recipe.steps):
        epoch, index = divmod(step, count // size)
        generator = torch.Generator().manual_seed(recipe.seed + epoch)
        order = torch.randperm(count, generator=generator).to(cached.hidden.device)
        yield step, cached.part(order[index * size : (index + 1) * size])


# ---------------------------------------------------------------------------------- the vocabulary

SHARE = 0.98  # of the answers' tokens that are in the shortlist
STRIDE = 256  # the shortlist's length is a multiple of this
EACH = 16  # tokens of answers that are needed for each token of the shortlist


def shortlist(answers: Iterable[Sequence[int]], vocabulary: int) -> tuple[int, ...]:
    """The tokens that heads may draft, in rising order: the fewest that make up SHARE of the
    answers, filled up to a multiple of STRIDE with the next frequent ones. Empty where the list
    would save little, above half of the vocabulary, and where the answers are too few to tell."""
    counts: Counter[int] = Counter()
    for ids in answers:
        counts.update(ids)
    total, seen, needed = counts.total(), 0, 0
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in ranked:
        if seen >= SHARE * total:
            break
        seen, needed = seen + counts[token], needed + 1
    length = min(-(-needed // STRIDE) * STRIDE, len(ranked))
    if not needed or 2 * length > vocabulary or total < EACH * length:
        return ()
    return tuple(sorted(ranked[:length]))


@dataclass(frozen=True)
class ShortVocabulary:
    """lm_head: hidden [n, d] -> logits [n, S] of the S tokens of a shortlist. places int64 [V]: the
    column of each token, IGNORED for a token outside.

    A product with 49,152 rows of an LM head is most of a step of the heads' training; tokens
    outside of the list are never drafted, so nothing is lost by not learning them.
    """

    lm_head: LogitHead
    places: Tensor

    @classmethod
    def of(cls, tokens: Sequence[int], lm_head: LogitHead) -> "ShortVocabulary | None":
        """The list as a vocabulary; None for an empty one, and for an LM head whose rows cannot be
        taken (in 4 or 8 bits)."""
        chosen = torch.tensor(tokens, dtype=torch.long)
        short = lm_head.rows(chosen) if tokens else None
        if short is None:
            return None
        weight = lm_head.linear.weight
        assert isinstance(weight, Tensor)
        places = torch.full((weight.shape[0],), IGNORED, device=weight.device)
        places[chosen] = torch.arange(len(tokens), device=weight.device)
        return cls(short, places)

    def columns(self, tokens: Tensor) -> Tensor:
        """tokens int64, IGNORED among them -> columns int64 of the same shape, IGNORED for those
        outside of the list."""
        return self.places[tokens.clamp(min=0)].masked_fill(tokens == IGNORED, IGNORED)


# ---------------------------------------------------------------------------------------- the loss


@dataclass(frozen=True)
class HeadLosses:
    """total: the scalar to minimise, float32. Per head, detached: mean losses [K] float32 in nats;
    hits [K, RANKS] int64, how often each of its first predictions was right; labels [K] int64. lm,
    lm_labels: the backbone's own loss and its labels, scalars, where it is trained as well. Sums
    are over the rows of this process, means over the labels of all processes."""

    total: Tensor
    losses: Tensor
    hits: Tensor
    labels: Tensor
    lm: Tensor | None = None
    lm_labels: Tensor | None = None


def medusa_loss(
    heads: MedusaHeads,
    lm_head: LMHead,
    inputs: HeadInputs,
    decay: float = 0.8,
    rows_at_once: int = ROWS_AT_ONCE,
    group: ProcessGroup = ALONE,
    trainable: Iterable[Tensor] = (),
) -> HeadLosses:
    """L_Medusa-1 = sum over k of decay^k CE_k, k from 1 (Medusa, arXiv 2401.10774, 2.2.1).

    CE_k is the mean over the labels of head k, of all processes. trainable: what has gradients
    beside the heads and `inputs.hidden`, as the adapter of the LM head. Logits of at most
    `rows_at_once` rows exist at a time.
    """
    hidden, roots, targets = inputs
    labels = group.sum((targets != IGNORED).sum(0))
    count = labels.clamp(min=1)
    weights = decay ** torch.arange(1, targets.shape[1] + 1, device=targets.device) / count
    parts: list[tuple[Tensor, Tensor]] = []

    def chunk_loss(chunk: slice, rows: Tensor) -> Tensor:
        sums, hits = _sums(heads, lm_head, HeadInputs(rows, roots[chunk], targets[chunk]))
        parts.append((sums.detach(), hits))
        return (weights * sums).sum()

    total = chunked_sum(chunk_loss, hidden, rows_at_once, [*heads.parameters(), *trainable])
    sums, hits = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return HeadLosses(total, sums / count, hits, labels)


def _sums(heads: MedusaHeads, lm_head: LMHead, inputs: HeadInputs) -> tuple[Tensor, Tensor]:
    """Sums of the cross-entropy [K] float32 in nats, and hits of each rank [K, RANKS] int64."""
    with half_precision(inputs.hidden):
        logits = heads(inputs.hidden, inputs.roots, lm_head).float()
    wanted = inputs.targets.T
    losses = F.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    )
    best = logits.detach().topk(min(RANKS, logits.shape[-1]), dim=-1).indices
    hits = (best == wanted.unsqueeze(-1)).sum(1)
    return losses.view_as(wanted).sum(1), F.pad(hits, (0, RANKS - hits.shape[1]))


@torch.no_grad()
def evaluate(
    loss: Callable[[Sequence[Example]], HeadLosses],
    examples: Sequence[Example],
    recipe: Recipe,
    step: int,
) -> Evaluated:
    """Losses and accuracies over the examples, each head's over its own labels. loss: of some."""
    groups = group_by_length(examples, recipe.batch_tokens, recipe.seed)
    results = [loss(rows) for rows in groups]
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0)
    own = [(r.lm, r.lm_labels) for r in results if r.lm is not None and r.lm_labels is not None]
    counts = sum(int(count) for _, count in own)
    lm = sum(float(mean) * int(count) for mean, count in own) / counts if own else None
    return Evaluated(step, tuple(losses.tolist()), top_shares(hits, labels), lm)


def top_shares(hits: Tensor, labels: Tensor) -> TopShares:
    """hits int64 [K, R] of each rank alone, labels int64 [K] -> [k][r]: how often the token of head
    k was among its first r + 1 predictions."""
    shares = hits.cumsum(-1) / labels.clamp(min=1).unsqueeze(-1)
    return tuple(tuple(row) for row in shares.tolist())


# -------------------------------------------------------------------------------------- in chunks


def chunked_sum(
    chunk_loss: Callable[[slice, Tensor], Tensor],
    rows: Tensor,
    size: int,
    trainable: Iterable[Tensor] = (),
) -> Tensor:
    """The sum, a float32 scalar, of chunk_loss(slice, rows[slice]) over slices of at most `size`
    rows. Logits of n rows take [n, V] a head, and as much again for their gradient; here those of a
    slice are gone before the next one's are made, and none are computed twice (checkpointing takes
    two forward passes): the gradients of a slice are computed with its loss.

    The gradients reach `rows` [n, ...] and those of `trainable` that require one, whatever else
    chunk_loss uses; none of these tensors may be computed from another. They are held until
    backward(), which may be called once.
    """
    is_wanted = torch.is_grad_enabled()
    inputs = [tensor for tensor in trainable if tensor.requires_grad and is_wanted]
    with_rows = rows.requires_grad and is_wanted
    gradients, of_rows = list[Tensor](), list[Tensor]()
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, max(len(rows), 1), size):  # one chunk at least: it makes the gradients
        chunk = slice(start, start + size)
        leaf = rows[chunk].detach().requires_grad_(with_rows)
        value = chunk_loss(chunk, leaf)
        total += value.detach()
        learning = [*inputs, leaf] if with_rows else inputs
        if not learning:
            continue
        new = list(torch.autograd.grad(value, learning, materialize_grads=True))
        if with_rows:
            of_rows.append(new.pop())
        gradients = [a.add_(b) for a, b in zip(gradients, new, strict=True)] if start else new
    if with_rows:
        inputs, gradients = [*inputs, rows], [*gradients, torch.cat(of_rows)]
    return total if not inputs else _WithGradients.apply(total, gradients, *inputs)


class _WithGradients(torch.autograd.Function):
    """A value with gradients that are already computed."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.gradients = ctx.gradients, None
        return None, None, *(gradient.mul_(outer[0].to(gradient.dtype)) for gradient in held)
