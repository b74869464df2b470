"""Optimizers of the heads and of the adapter, each with the peak of its learning rate."""

import math
from collections.abc import Iterable

import torch
from torch import nn

from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.muon import Muon

Optimizers = list[tuple[torch.optim.Optimizer, float]]


def head_optimizers(
    heads: MedusaHeads, kind: str, rate: float, other_rate: float, decay: float
) -> Optimizers:
    """kind "muon": Muon at `rate` for the matrices of the residual layers, AdamW at `other_rate`
    for all other parameters. "adamw": AdamW at `rate` for all. decay: the weight decay."""
    if kind == "adamw":
        return [adamw(heads.parameters(), rate, decay)]
    rest = [p for p in heads.parameters() if p is not heads.weight]
    return [
        (Muon([heads.weight], rate, weight_decay=decay), rate),
        adamw(rest, other_rate, decay),
    ]


def adamw(
    parameters: Iterable[nn.Parameter], rate: float, decay: float
) -> tuple[torch.optim.Optimizer, float]:
    """AdamW and its peak learning rate; on CUDA the 8-bit AdamW of bitsandbytes, whose state takes
    a quarter of the memory."""
    chosen = list(parameters)
    if chosen and chosen[0].is_cuda:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(chosen, lr=rate, weight_decay=decay), rate
    return torch.optim.AdamW(chosen, lr=rate, weight_decay=decay), rate


def share_of_peak(step: int, steps: int, warmup: int) -> float:
    """Share of the peak learning rate at a step from 0: linear warmup, then a half cosine to 0."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(steps - warmup, 1)
    return 0.5 * (1 + math.cos(math.pi * progress))
