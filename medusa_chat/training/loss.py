"""The loss of the heads on the backbone's hidden states (Medusa-1)."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.heads import MedusaHeads, half_precision
from medusa_chat.training.chunked_loss import chunked_sum
from medusa_chat.training.data import Batch
from medusa_chat.training.events import Evaluated, TopShares
from medusa_chat.training.process_group import ALONE, ProcessGroup

IGNORED = -100  # a target where a head has no label
RANKS = 5  # predictions of a head that are counted while it learns
ROWS_AT_ONCE = 512  # whose logits exist at a time
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


class HeadInputs(NamedTuple):
    """The n positions at which any head has a target: hidden [n, d] in the backbone's dtype,
    roots [n] and targets [n, K] int64."""

    hidden: Tensor
    roots: Tensor
    targets: Tensor

    def part(self, chosen: Tensor) -> "HeadInputs":
        """The positions at some indices int64 [m]."""
        return HeadInputs(*(tensor[chosen] for tensor in self))


def head_inputs(model: Any, batch: Batch, heads: int) -> HeadInputs:
    """Run the frozen backbone over a batch: the inputs, on its device, of hidden states after the
    final norm."""
    device = model.get_input_embeddings().weight.device
    targets = head_targets(batch.ids.to(device), batch.is_label.to(device), heads)
    with torch.inference_mode():
        hidden = run_decoder(model, batch)
    chosen = (targets != IGNORED).any(-1)
    # indexing outside inference mode copies, so autograd may keep the result
    roots = batch.next_ids.to(device)[chosen]
    return HeadInputs(hidden[chosen], roots, targets[chosen])


def run_decoder(model: Any, batch: Batch) -> Tensor:
    """Hidden states [b, t, d] after the final norm, in the model's dtype."""
    ids = batch.ids.to(model.get_input_embeddings().weight.device)
    hidden: Tensor = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    return hidden


def medusa_loss(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    roots: Tensor,
    targets: Tensor,
    decay: float = 0.8,
    rows_at_once: int = ROWS_AT_ONCE,
    group: ProcessGroup = ALONE,
    trainable: Iterable[Tensor] = (),
) -> HeadLosses:
    """L_Medusa-1 = sum over k of decay^k CE_k, k from 1 (Medusa, arXiv 2401.10774, 2.2.1).

    hidden [n, d], roots int64 [n], targets [n, K] int64 with IGNORED where a head has none. CE_k
    is the mean over the labels of head k, of all processes. trainable: what has gradients beside
    the heads and `hidden`, as the adapter of the LM head. Logits of at most `rows_at_once` rows
    exist at a time.
    """
    labels = group.sum((targets != IGNORED).sum(0))
    count = labels.clamp(min=1)
    weights = decay ** torch.arange(1, targets.shape[1] + 1, device=targets.device) / count
    parts: list[tuple[Tensor, Tensor]] = []

    def chunk_loss(chunk: slice, rows: Tensor) -> Tensor:
        sums, hits = _sums(heads, lm_head, rows, roots[chunk], targets[chunk])
        parts.append((sums.detach(), hits))
        return (weights * sums).sum()

    total = chunked_sum(chunk_loss, hidden, rows_at_once, [*heads.parameters(), *trainable])
    sums, hits = (torch.stack(part).sum(0) for part in zip(*parts, strict=True))
    return HeadLosses(total, sums / count, hits, labels)


def _sums(
    heads: MedusaHeads, lm_head: LMHead, hidden: Tensor, roots: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """hidden [n, d], roots [n], targets [n, K] -> sums of the cross-entropy [K] float32 in nats
    and hits of each rank [K, RANKS] int64."""
    with half_precision(hidden):
        logits = heads(hidden, roots, lm_head).float()
    wanted = targets.T
    flat = logits.flatten(0, 1), wanted.flatten()
    losses = F.cross_entropy(*flat, ignore_index=IGNORED, reduction="none").view_as(wanted)
    best = logits.detach().topk(min(RANKS, logits.shape[-1]), dim=-1).indices
    hits = (best == wanted.unsqueeze(-1)).sum(1)
    hits = F.pad(hits, (0, RANKS - hits.shape[1]))
    return losses.sum(1), hits


def evaluated(step: int, results: Sequence[HeadLosses], lm: float | None = None) -> Evaluated:
    """Losses and accuracies over the rows of all results, each head's over its own labels. lm: the
    backbone's own loss."""
    labels = torch.stack([r.labels for r in results]).sum(0).clamp(min=1)
    losses = torch.stack([r.losses * r.labels for r in results]).sum(0) / labels
    hits = torch.stack([r.hits for r in results]).sum(0)
    return Evaluated(step, tuple(losses.tolist()), top_shares(hits, labels), lm)


def top_shares(hits: Tensor, labels: Tensor) -> TopShares:
    """hits int64 [K, R] of each rank alone, labels int64 [K] -> [k][r]: how often the token of head
    k was among its first r + 1 predictions."""
    found = hits.cumsum(-1) / labels.clamp(min=1).unsqueeze(-1)
    return tuple(tuple(row) for row in found.tolist())
