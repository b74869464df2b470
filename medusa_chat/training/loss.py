"""The loss of the heads on the backbone's hidden states (Medusa-1)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.training.chunked_loss import chunked_sum, cross_entropy
from medusa_chat.training.data import Batch
from medusa_chat.training.events import TopShares

IGNORED = -100  # a target where a head has no label
RANKS = 5  # predictions of a head that are counted while it learns
CHUNK = 512  # rows whose logits exist at a time
LMHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadLosses:
    """total: the scalar to minimise, float32. Per head, detached: mean losses [K] float32 in nats;
    hits [K, RANKS] int64, how often each of its first predictions was right; labels [K] int64. lm:
    the backbone's own loss, a scalar, where the backbone is trained as well. Sums are over the rows
    of this process, means over the labels of all processes."""

    total: Tensor
    losses: Tensor
    hits: Tensor
    labels: Tensor
    lm: Tensor | None = None


@dataclass(frozen=True)
class SoftTargets:
    """The backbone's own distribution at the positions that the heads predict: its R most probable
    tokens [n, K, R] int32 and their probabilities [n, K, R] float32, which are normalised to a sum
    of 1. Where a head has no target the values have no meaning. A head learns more from them than
    from the one token of the data."""

    tokens: Tensor
    probabilities: Tensor

    def __getitem__(self, chosen: Any) -> "SoftTargets":
        return SoftTargets(self.tokens[chosen], self.probabilities[chosen])


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


def hidden_and_targets(
    model: Any, batch: Batch, heads: int, keep: Callable[[Tensor], None] | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """At the n positions where any head has a target: hidden states after the final norm [n, d] in
    the model's dtype, roots [n] and targets [n, K] int64, and the index of the batch's example [n]
    int64. keep: is given the hidden states [b, t, d]."""
    device = model.get_input_embeddings().weight.device
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
    if keep is not None:
        keep(hidden)
    chosen = (targets != IGNORED).any(-1)
    # indexing outside inference mode copies, so autograd may keep the result
    roots = batch.next_ids.to(device)[chosen]
    return hidden[chosen], roots, targets[chosen], owners_of(batch, chosen)


def hidden_and_soft_targets(
    model: Any, batch: Batch, heads: int, lm_head: LMHead, count: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, SoftTargets]:
    """As hidden_and_targets: hidden [n, d], roots, targets and owners int64 [n], [n, K] and [n];
    with the
    backbone's `count` most probable tokens for each target: tokens int32 and probabilities float32
    [n, K, count]."""
    device = model.get_input_embeddings().weight.device
    is_label = batch.is_label.to(device)
    targets = head_targets(batch.ids.to(device), is_label, heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
        tokens, probabilities = _most_probable(hidden, is_label, lm_head, count)
        soft = SoftTargets(_shifted(tokens, heads), _shifted(probabilities, heads))
    chosen = (targets != IGNORED).any(-1)
    roots = batch.next_ids.to(device)[chosen]
    return hidden[chosen], roots, targets[chosen], owners_of(batch, chosen), soft[chosen]


def _most_probable(
    hidden: Tensor, is_label: Tensor, lm_head: LMHead, count: int
) -> tuple[Tensor, Tensor]:
    """hidden [b, t, d] -> tokens [b, t, R] int32 and probabilities [b, t, R] float32 of the token
    after every position, where that token is a label; zeros elsewhere."""
    precedes_label = torch.zeros_like(is_label)
    precedes_label[:, :-1] = is_label[:, 1:]
    shape = (*is_label.shape, count)
    tokens = torch.zeros(shape, dtype=torch.int32, device=hidden.device)
    probabilities = torch.zeros(shape, device=hidden.device)
    for positions in precedes_label.nonzero().split(CHUNK):
        at = positions.unbind(-1)
        logits = lm_head(hidden[at]).float()
        best = logits.softmax(-1).topk(min(count, logits.shape[-1]))
        missing = (0, count - best.values.shape[-1])
        tokens[at] = F.pad(best.indices, missing).int()
        probabilities[at] = F.pad(best.values / best.values.sum(-1, keepdim=True), missing)
    return tokens, probabilities


def _shifted(values: Tensor, heads: int) -> Tensor:
    """values [b, t, R] -> [b, t, K, R]: entry [t, k] is the value at t + k + 1, where the backbone
    predicts the token that head k (from 0) predicts at t."""
    found = values.new_zeros(*values.shape[:2], heads, values.shape[2])
    for head in range(min(heads, values.shape[1] - 1)):
        found[:, : -head - 1, head] = values[:, head + 1 :]
    return found


def run_decoder(model: Any, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] after the final norm, in the model's dtype. Examples of a packed row
    do not attend to one another."""
    device = model.get_input_embeddings().weight.device
    inputs = {"input_ids": batch.ids.to(device)}
    if batch.positions is not None:
        inputs["attention_mask"] = batch.mask(model.dtype, device)
        inputs["position_ids"] = batch.positions.to(device)
    hidden: Tensor = model.get_decoder()(use_cache=False, **inputs).last_hidden_state
    return hidden


def owners_of(batch: Batch, chosen: Tensor) -> Tensor:
    """chosen [b, t] bool -> [n] int64: the index of the example that each chosen position is of."""
    if batch.owners is None:
        return chosen.nonzero()[:, 0]
    return batch.owners.to(chosen.device)[chosen]


def medusa_loss(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    roots: Tensor,
    targets: Tensor,
    decay: float = 0.8,
    rows_at_once: int = 512,
    labels: Tensor | None = None,
    soft: SoftTargets | None = None,
    trainable: Iterable[Tensor] = (),
) -> HeadLosses:
    """L_Medusa-1 = sum over k of decay^k CE_k, k from 1 (Medusa, arXiv 2401.10774, 2.2.1).

    hidden [n, d], roots int64 [n],
    targets [n, K] int64 with IGNORED where a head has none. CE_k is the mean over
    the labels of head k, or over `labels` [K] int64 where these rows are only a part of them. soft:
    distributions that are learnt instead of the targets. trainable: what has gradients beside the
    heads and `hidden`, as the adapter of the LM head. Logits of at most `rows_at_once` rows exist
    at a time.
    """
    labels = (targets != IGNORED).sum(0) if labels is None else labels
    count = labels.clamp(min=1)
    weights = decay ** torch.arange(1, targets.shape[1] + 1, device=targets.device) / count
    parts: list[tuple[Tensor, Tensor]] = []

    def chunk_loss(chunk: slice, rows: Tensor) -> Tensor:
        wanted = None if soft is None else soft[chunk]
        sums, hits = _sums(heads, lm_head, rows, roots[chunk], targets[chunk], wanted)
        parts.append((sums.detach(), hits))
        return (weights * sums).sum()

    total = chunked_sum(chunk_loss, hidden, rows_at_once, [*heads.parameters(), *trainable])
    sums, hits = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return HeadLosses(total, sums / count, hits, labels)


def _sums(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    roots: Tensor,
    targets: Tensor,
    soft: SoftTargets | None,
) -> tuple[Tensor, Tensor]:
    """hidden [n, d], roots [n],
    targets [n, K] -> sums of the cross-entropy [K] float32 in nats and hits of
    each rank [K, RANKS] int64."""
    with half_precision(hidden):
        logits = heads(hidden, roots, lm_head).float()
    wanted = targets.T
    if soft is None:
        losses = cross_entropy(logits, wanted, IGNORED)
    else:
        tokens = soft.tokens.transpose(0, 1).long()
        log_probabilities = logits.log_softmax(-1).gather(-1, tokens)
        losses = -(soft.probabilities.transpose(0, 1) * log_probabilities).sum(-1)
        losses = losses.masked_fill(wanted == IGNORED, 0.0)
    best = logits.detach().topk(min(RANKS, logits.shape[-1]), dim=-1).indices
    hits = (best == wanted.unsqueeze(-1)).sum(1)
    hits = F.pad(hits, (0, RANKS - hits.shape[1]))
    return losses.sum(1), hits


def top_shares(hits: Tensor, labels: Tensor) -> TopShares:
    """hits int64 [K, R] of each rank alone, labels int64 [K] -> [k][r]: how often the token of head
    k was among its first r + 1 predictions."""
    found = hits.cumsum(-1) / labels.clamp(min=1).unsqueeze(-1)
    return tuple(tuple(row) for row in found.tolist())
