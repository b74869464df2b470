"""Sampling: what top-k and top-p leave of scores, and noise that is a function of the place."""

import torch
from torch import Tensor

from medusa_chat.decoding.settings import GenerationSettings

MASK32 = 0xFFFFFFFF
IMPOSSIBLE = -1000.0  # a log-probability whose probability is 0 in any precision, and not infinite


def entropies(log_p: Tensor) -> Tensor:
    """Entropy in nats of rows of log-probabilities [n, V] -> [n] in their dtype; impossible tokens
    add nothing."""
    return -(log_p.exp() * log_p.clamp(min=IMPOSSIBLE)).sum(-1)


def filtered(scores: Tensor, settings: GenerationSettings) -> Tensor:
    """Top-k, then top-p: scores float32 [n, V] with what is left out at -inf."""
    if 0 < settings.top_k < scores.shape[-1]:
        lowest = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if settings.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        share = torch.softmax(ordered, -1)
        beyond = share.cumsum(-1) - share >= settings.top_p
        beyond[:, 0] = False
        scores = scores.masked_fill(torch.zeros_like(beyond).scatter(1, order, beyond), -torch.inf)
    return scores


def gumbel(seed: int | Tensor, positions: Tensor, vocabulary: int) -> Tensor:
    """Gumbel noise float32 [p, V], a function of (seed, position, token) alone.

    All nodes of one depth share it, and a later pass over the same position draws it again: so
    `exact` gives token for token what plain sampling with the same seed gives, whatever the tree.
    """
    low, high = seed & MASK32, seed >> 32
    start = _mix(torch.zeros_like(positions) + low + 0x9E3779B9)
    key = _mix(start ^ (_mix(positions * 0x85EBCA77 + 1) + _mix(start + high)) & MASK32)
    tokens = torch.arange(vocabulary, device=positions.device) * 0x9E3779B1 & MASK32
    bits = _mix(_mix((tokens + key.unsqueeze(1)) & MASK32) ^ _mix(key + 0x27D4EB2F).unsqueeze(1))
    uniform = ((bits >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(uniform))


def _mix(x: Tensor) -> Tensor:
    """A 32-bit mixing function (MurmurHash3's finaliser) on int64 tensors."""
    x = x & MASK32
    x = (x ^ x >> 16) * 0x85EBCA6B & MASK32
    x = (x ^ x >> 13) * 0xC2B2AE35 & MASK32
    return x ^ x >> 16
