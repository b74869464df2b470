"""Optimizers of the heads and of the adapter, each with its peak learning rate: Muon and AdamW."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from medusa_chat.checkpoints.devices import has_fast_bf16
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.stage_recipes import HeadRecipe

MOMENTUM = 0.95  # of Muon
Optimizers = list[tuple[torch.optim.Optimizer, float]]


def head_optimizers(heads: MedusaHeads, recipe: HeadRecipe) -> Optimizers:
    """The recipe's optimizers of the heads: with Muon that one is for the matrices of the layers
    and of the root, and AdamW for all other parameters."""
    rate, decay = recipe.learning_rate, recipe.weight_decay
    if recipe.optimizer == "adamw":
        return [adamw(heads.parameters(), rate, decay)]
    matrices = [p for p in (heads.weight, heads.root_weight) if p is not None]
    rest = [p for p in heads.parameters() if all(p is not one for one in matrices)]
    muon = Muon(matrices, rate, decay), rate
    return [muon, adamw(rest, rate / 10, decay)]


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


class Muon(torch.optim.Optimizer):
    """Momentum with an update that five Newton-Schulz steps orthogonalise (Jordan 2024).

    Parameters are [..., n, m]: each matrix of the last two dimensions has its own update. Unlike
    torch.optim.Muon, which computes in bf16 and takes single matrices, this one computes in fp32
    where bf16 is slower: on a CPU that does not multiply it itself.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], lr: float, weight_decay: float = 0.01
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": MOMENTUM, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("momentum", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonal(p.grad.lerp(average, group["momentum"]))
                scale = group["lr"] * 0.2 * math.sqrt(max(p.shape[-2:]))
                p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-scale)


def orthogonal(x: Tensor) -> Tensor:
    """x [..., n, m] -> [..., n, m] of the same dtype: roughly the nearest (semi-)orthogonal matrix
    to each."""
    is_fast = x.is_cuda or has_fast_bf16()
    y = x.reshape(-1, *x.shape[-2:]).to(torch.bfloat16 if is_fast else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    y = y.mT if is_tall else y
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        square = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        y = torch.baddbmm(y, square, y, beta=3.4445)
    return (y.mT if is_tall else y).to(x.dtype).view_as(x)
