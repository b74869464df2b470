"""Sampling: a token from logits, by noise that is a function of its place in the text."""

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.settings import GenerationSettings

MASK32 = 0xFFFFFFFF
Position = int | Tensor  # of the root in the text; a tensor [1] where only the device knows it


def own_tokens(
    logits: Tensor, tensors: TreeTensors, position: Position, settings: GenerationSettings
) -> Tensor:
    """The backbone's own token after each node: logits [n, V] -> int64 [n].

    Greedy at temperature 0 (the lowest index wins a tie), else a sample by Gumbel-max.
    """
    if settings.is_greedy:
        return logits.argmax(-1)
    scores = filtered(logits.float() / settings.scale, settings)
    return with_noise(scores, tensors, position, settings).argmax(-1)


def filtered(scores: Tensor, settings: GenerationSettings) -> Tensor:
    """Top-k, then top-p: scores [n, V] with what is left out at -inf."""
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


def with_noise(
    scores: Tensor, tensors: TreeTensors, position: Position, settings: GenerationSettings
) -> Tensor:
    """Scores [n, V] with the Gumbel noise of each node's depth: the largest is a sample."""
    assert settings.seed is not None, "a sampling run needs its seed resolved"
    places = position + 1 + torch.arange(tensors.paths.shape[1], device=scores.device)
    noise = gumbel(settings.seed, places, scores.shape[-1])
    return scores + noise.index_select(0, tensors.depths)


def gumbel(seed: int, positions: Tensor, vocabulary: int) -> Tensor:
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
