"""Filters: what top-k, top-p and min-p leave of scores to sample from."""

import math

import torch
from torch import Tensor

from medusa_chat.decoding.settings import GenerationSettings

LIKELY = (1024, 8192)  # of how many tokens a CPU tries whether they are enough for top-p


def filtered(scores: Tensor, settings: GenerationSettings) -> Tensor:
    """Top-k, then top-p, then min-p: scores float32 [n, V] with what is left out at -inf."""
    if 0 < settings.top_k < scores.shape[-1]:
        lowest = scores.topk(settings.top_k, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < lowest, -torch.inf)
    if settings.top_p < 1:
        scores = scores.masked_fill(_beyond(scores, settings.top_p), -torch.inf)
    if settings.min_p > 0:  # Nguyen et al., arXiv 2407.01082: p >= min_p * max(p)
        least = scores.amax(-1, keepdim=True) + math.log(settings.min_p)
        scores = scores.masked_fill(scores < least, -torch.inf)
    return scores


def _beyond(scores: Tensor, top_p: float) -> Tensor:
    """Which tokens of scores [n, V] come, from the most likely one on and the lowest index first
    among equals, when the share top_p is reached: bool [n, V]. A row's are the same whatever rows
    stand beside it.

    On a CPU a sort of 49,152 scores takes ten times what finding the first 1,024 of them does, and
    those are nearly always enough; the shares, of the whole row, are the same either way.
    """
    shares, every = torch.softmax(scores, -1), scores.shape[-1]
    for count in (*(LIKELY if scores.is_cpu else ()), every):
        best, order = _most_likely(scores, count)
        until = shares.gather(1, order).cumsum(-1)
        # of equals at the end there may be more than are looked at
        if count >= every or bool(((until >= top_p) & (best > best[:, -1:])).any(-1).all()):
            break
    beyond = torch.zeros_like(until, dtype=torch.bool)
    beyond[:, 1:] = until[:, :-1] >= top_p
    return torch.ones_like(scores, dtype=torch.bool).scatter(1, order, beyond)


def _most_likely(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(scores, tokens) of the `count` largest of each row, in turn."""
    if count >= scores.shape[-1]:
        return torch.sort(scores, dim=-1, descending=True, stable=True)
    among = scores.topk(count).indices.sort(-1).values
    best, at = torch.sort(scores.gather(1, among), dim=-1, descending=True, stable=True)
    return best, among.gather(1, at)
