"""Muon: an optimizer for matrices with orthogonalised updates."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum with an update that five Newton-Schulz steps orthogonalise (Jordan 2024).

    Parameters are [..., n, m]: each matrix of the last two dimensions has its own update. Unlike
    torch.optim.Muon, which computes in bf16 and takes single matrices, this one computes in fp32 on
    a CPU, where bf16 is slower.
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

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
    y = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    y = y.mT if is_tall else y
    y = y / (torch.linalg.matrix_norm(y, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return (y.mT if is_tall else y).to(x.dtype)
