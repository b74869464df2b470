"""Muon: an optimizer for matrices, whose updates are orthogonal."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """Momentum whose update is orthogonalised by five Newton-Schulz steps (Jordan 2024).

    For parameters [..., n, m]: every matrix of the last two dimensions by itself. Unlike
    torch.optim.Muon, which always works in bf16 and on single matrices, this one works in fp32
    where bf16 is not what the device computes fastest.
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
    """The nearest (semi-)orthogonal matrix to each x [..., n, m], roughly."""
    work = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    is_tall = x.shape[-2] > x.shape[-1]
    work = work.mT if is_tall else work
    work = work / (torch.linalg.matrix_norm(work, keepdim=True) + 1e-7)
    for _ in range(5):
        gram = work @ work.mT
        work = 3.4445 * work + (-4.7750 * gram + 2.0315 * gram @ gram) @ work
    return (work.mT if is_tall else work).to(x.dtype)
