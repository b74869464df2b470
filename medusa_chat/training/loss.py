"""The loss of the heads on a frozen backbone (Medusa-1)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.data import Batch

IGNORED = -100
LMHead = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class HeadLosses:
    """total: the scalar to minimise. Per head [K], detached: mean loss, top-1 hits, labels."""

    total: Tensor
    losses: Tensor
    hits: Tensor
    labels: Tensor


def targets_of(ids: Tensor, is_label: Tensor, heads: int) -> Tensor:
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
    ids = batch.ids.to(device)
    targets = targets_of(ids, batch.is_label.to(device), heads)
    with torch.inference_mode():
        hidden = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
    chosen = (targets != IGNORED).any(-1)
    # indexing outside inference mode copies, so autograd may keep the result
    return hidden[chosen], targets[chosen], chosen.nonzero()[:, 0]


def medusa_loss(
    heads: MedusaHeads,
    lm_head: LMHead,
    hidden: Tensor,
    targets: Tensor,
    decay: float = 0.8,
    rows_at_once: int = 512,
) -> HeadLosses:
    """L_Medusa-1 = sum over k of decay^k CE_k, k from 1 (Medusa, arXiv 2401.10774, 2.2.1).

    hidden [n, d], targets [n, K] with IGNORED where there is none; each head's loss is the mean
    over its own labels. Logits of at most `rows_at_once` rows exist at a time, in the forward and
    in the backward pass.
    """
    labels = (targets != IGNORED).sum(0)
    sums = hidden.new_zeros(targets.shape[1], dtype=torch.float32)
    hits = torch.zeros_like(labels)
    for rows, wanted in zip(hidden.split(rows_at_once), targets.split(rows_at_once), strict=True):
        part, right = checkpoint(_sums, heads, lm_head, rows, wanted, use_reentrant=False)
        sums, hits = sums + part, hits + right
    losses = sums / labels.clamp(min=1)
    weights = decay ** torch.arange(1, len(losses) + 1, device=losses.device)
    return HeadLosses((weights * losses).sum(), losses.detach(), hits, labels)


def _sums(
    heads: MedusaHeads, lm_head: LMHead, hidden: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy [K] and top-1 hits [K] of a few rows."""
    half = hidden.dtype in (torch.bfloat16, torch.float16)
    with torch.autocast(hidden.device.type, torch.bfloat16, enabled=half):
        logits = heads(hidden, lm_head).float()
    wanted = targets.T
    losses = F.cross_entropy(
        logits.flatten(0, 1), wanted.flatten(), ignore_index=IGNORED, reduction="none"
    )
    hits = (logits.detach().argmax(-1) == wanted).sum(1)
    return losses.view_as(wanted).sum(1), hits
