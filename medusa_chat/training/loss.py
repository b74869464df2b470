"""The loss of the heads on a frozen backbone (Medusa-1)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.chunked_loss import chunked_sum, cross_entropy
from medusa_chat.training.data import Batch

IGNORED = -100
RANKS = 5  # predictions of a head that are watched while it learns
LMHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadLosses:
    """total: the scalar to minimise. Per head, detached: mean loss [K]; how often each of its
    first predictions was right, hits [K, RANKS]; labels [K]. lm: the backbone's own loss, where
    that is trained as well. The sums are those of this process, the means over `labels` of all."""

    total: Tensor
    losses: Tensor
    hits: Tensor
    labels: Tensor
    lm: Tensor | None = None


@dataclass(frozen=True)
class SoftTargets:
    """What the backbone itself would say where a head is asked: its most probable tokens
    [n, K, R] and their shares [n, K, R], which add up to 1. Where no head is asked they say
    nothing. A head that learns them learns more from a place than the one token that came."""

    tokens: Tensor
    shares: Tensor

    def __getitem__(self, chosen: Any) -> "SoftTargets":
        return SoftTargets(self.tokens[chosen], self.shares[chosen])


def head_targets(ids: Tensor, is_label: Tensor, heads: int) -> Tensor:
    """ids, is_label [b, t] -> [b, t, K]: the token each head is to predict, or IGNORED.

    Head k (from 0) at t has the token at t + k + 2, and only where every token from t + 1 to
    there is a label: at such places it is asked when decoding, and no answer crosses a turn.
    """
    targets = ids.new_full((*ids.shape, heads), IGNORED)
    unbroken = is_label[:, 1:]
    for head in range(min(heads, ids.shape[1] - 2)):
        unbroken = unbroken[:, :-1] & is_label[:, head + 2 :]
        wanted = ids[:, head + 2 :].masked_fill(~unbroken, IGNORED)
        targets[:, : wanted.shape[1], head] = wanted
    return targets


def hidden_and_targets(model: Any, batch: Batch, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where any head has a label: hidden states after the final norm [n, d], targets [n, K], and
    the row of the batch [n] they stand in."""
    device = model.get_input_embeddings().weight.device
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
    chosen = (targets != IGNORED).any(-1)
    # indexing outside inference mode copies, so autograd may keep the result
    return hidden[chosen], targets[chosen], owners_of(batch, chosen)


def hidden_and_soft_targets(
    model: Any, batch: Batch, heads: int, lm_head: LMHead, count: int
) -> tuple[Tensor, Tensor, Tensor, SoftTargets]:
    """hidden_and_targets, and the backbone's `count` most probable tokens for each target."""
    device = model.get_input_embeddings().weight.device
    is_label = batch.is_label.to(device)
    targets = head_targets(batch.ids.to(device), is_label, heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
        tokens, shares = _most_probable(hidden, is_label, lm_head, count)
        soft = SoftTargets(_ahead(tokens, heads), _ahead(shares, heads))
    chosen = (targets != IGNORED).any(-1)
    return hidden[chosen], targets[chosen], owners_of(batch, chosen), soft[chosen]


def _most_probable(
    hidden: Tensor, is_label: Tensor, lm_head: LMHead, count: int
) -> tuple[Tensor, Tensor]:
    """[b, t, R] each: of the token after every place, where that is a label; else of token 0."""
    asked = torch.zeros_like(is_label)
    asked[:, :-1] = is_label[:, 1:]
    shape = (*is_label.shape, count)
    tokens = torch.zeros(shape, dtype=torch.int32, device=hidden.device)
    shares = torch.zeros(shape, device=hidden.device)
    places = asked.nonzero()
    for some in places.split(512):  # rows whose logits exist at a time
        at = some.unbind(-1)
        logits = lm_head(hidden[at]).float()
        best = logits.softmax(-1).topk(min(count, logits.shape[-1]))
        missing = (0, count - best.values.shape[-1])
        tokens[at] = F.pad(best.indices, missing).int()
        shares[at] = F.pad(best.values / best.values.sum(-1, keepdim=True), missing)
    return tokens, shares


def _ahead(values: Tensor, heads: int) -> Tensor:
    """[b, t, R] -> [b, t, K, R]: of the place that foresees the token of head k (from 0) at t."""
    found = values.new_zeros(*values.shape[:2], heads, values.shape[2])
    for head in range(min(heads, values.shape[1] - 1)):
        found[:, : -head - 1, head] = values[:, head + 1 :]
    return found


def run_decoder(model: Any, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] after the final norm, each example by itself."""
    table = model.get_input_embeddings().weight
    apart = {}
    if batch.positions is not None:
        apart["attention_mask"] = batch.mask(model.dtype, table.device)
        apart["position_ids"] = batch.positions.to(table.device)
    ids = batch.ids.to(table.device)
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False, **apart).last_hidden_state
    return hidden


def owners_of(batch: Batch, chosen: Tensor) -> Tensor:
    """Which of the batch's examples each chosen place [b, t] stands in."""
    if batch.owners is None:
        return chosen.nonzero()[:, 0]
    return batch.owners.to(chosen.device)[chosen]


def medusa_loss(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    targets: Tensor,
    decay: float = 0.8,
    rows_at_once: int = 512,
    labels: Tensor | None = None,
    soft: SoftTargets | None = None,
    learning: Iterable[Tensor] = (),
) -> HeadLosses:
    """L_Medusa-1 = sum over k of decay^k CE_k, k from 1 (Medusa, arXiv 2401.10774, 2.2.1).

    hidden [n, d], targets [n, K] with IGNORED where there is none; each head's loss is the mean
    over its own labels, or over `labels` [K] where these are but a part of them. Logits of at most
    `rows_at_once` rows exist at a time. soft: what is learnt instead of the one token that came.
    learning: what learns beside the heads and `hidden`, as an adapter of the LM head.
    """
    labels = (targets != IGNORED).sum(0) if labels is None else labels
    count = labels.clamp(min=1)
    weights = decay ** torch.arange(1, targets.shape[1] + 1, device=targets.device) / count
    found: list[tuple[Tensor, Tensor]] = []

    def part(some: slice, rows: Tensor) -> Tensor:
        goal = None if soft is None else soft[some]
        sums, right = _sums(heads, lm_head, rows, targets[some], goal)
        found.append((sums.detach(), right))
        return (weights * sums).sum()

    total = chunked_sum(part, hidden, rows_at_once, [*heads.parameters(), *learning])
    sums, hits = (torch.stack(one).sum(0) for one in zip(*found, strict=True))
    return HeadLosses(total, sums / count, hits, labels)


def _sums(
    heads: MedusaHeads, lm_head: LMHead, hidden: Tensor, targets: Tensor, soft: SoftTargets | None
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy [K] and hits of each rank [K, RANKS] of a few rows."""
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
        logits = heads(hidden, lm_head).float()
    wanted = targets.T
    if soft is None:
        losses = cross_entropy(logits, wanted, IGNORED)
    else:
        said = logits.log_softmax(-1).gather(-1, soft.tokens.transpose(0, 1).long())
        losses = -(soft.shares.transpose(0, 1) * said).sum(-1)
        losses = losses.masked_fill(wanted == IGNORED, 0.0)
    best = logits.detach().topk(min(RANKS, logits.shape[-1]), dim=-1).indices
    hits = (best == wanted.unsqueeze(-1)).sum(1)
    hits = F.pad(hits, (0, RANKS - hits.shape[1]))
    return losses.sum(1), hits
