"""Known gradients: losses over many rows whose logits are never held together, nor made twice.

A loss of n rows needs [n, V] logits per head, for the gradient once more. Here each few rows'
gradients are computed as soon as their loss is (their weights in the whole are known before), and
handed over when the whole is asked for its own: one pass forward and one backward, where
checkpointing takes two forward.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

RowsLoss = Callable[[slice, Tensor], Tensor]


def chunked_sum(
    part: RowsLoss, rows: Tensor, at_once: int, learning: Iterable[Tensor] = ()
) -> Tensor:
    """The sum of part(slice, rows[slice]), scalars, over slices of at most `at_once` rows.

    Its gradients reach `rows` [n, ...] and those of `learning` that ask for one, whatever else
    part() uses; each has to be a tensor of its own, and no two may come from one sum of both. They
    are held until they are asked for, which may be once.
    """
    is_wanted = torch.is_grad_enabled()
    learnt = [tensor for tensor in learning if tensor.requires_grad and is_wanted]
    gradient_sums = _GradientSums(learnt, rows.requires_grad and is_wanted)
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, max(len(rows), 1), at_once):  # without rows there are gradients too
        total += gradient_sums.add(part, slice(start, start + at_once), rows)
    gradients = gradient_sums.gradients
    if gradient_sums.of_rows:
        learnt, gradients = [*learnt, rows], [*gradients, torch.cat(gradient_sums.of_rows)]
    return total if not learnt else _KnownGradients.apply(total, gradients, *learnt)


class _GradientSums:
    """gradients: the sums so far, one for each that learns; of_rows: the rows' own."""

    def __init__(self, learnt: list[Tensor], learns_rows: bool) -> None:
        self._learnt, self._learns_rows = learnt, learns_rows
        self.gradients: list[Tensor | None] = [None] * len(learnt)
        self.of_rows: list[Tensor] = []

    def add(self, part: RowsLoss, some: slice, rows: Tensor) -> Tensor:
        """part()'s value, detached. What it was computed from is gone when this returns."""
        leaf = rows[some].detach().requires_grad_(self._learns_rows)
        value = part(some, leaf)
        asked = [*self._learnt, leaf] if self._learns_rows else self._learnt
        if not asked:
            return value.detach()
        found = list(torch.autograd.grad(value, asked, allow_unused=True))
        if self._learns_rows:
            last = found.pop()
            self.of_rows.append(torch.zeros_like(leaf) if last is None else last)
        for place, old in enumerate(self.gradients):
            new, found[place] = found[place], None
            if old is None:
                self.gradients[place] = new
            elif new is not None:
                old.add_(new)
        return value.detach()


def cross_entropy(logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
    """logits float32 [..., V], wanted int64 [...] -> losses [...], 0 where `wanted` is `ignored`.

    torch's own in half the passes over memory. Its gradient may be asked for once, and takes the
    place of the probabilities; `logits` stay as they are.
    """
    losses: Tensor = _CrossEntropy.apply(logits, wanted, ignored)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
        is_asked = wanted != ignored
        place = wanted.where(is_asked, 0).unsqueeze(-1)
        most, first = logits.max(-1, keepdim=True)
        shares = logits.softmax(-1)
        # the largest share's logarithm is exact where the wanted one's may be that of 0
        losses = (most - logits.gather(-1, place)) - shares.gather(-1, first).log()
        ctx.is_asked, ctx.place, ctx.shares = is_asked, place, shares
        return losses.squeeze(-1).where(is_asked, 0.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        shares, ctx.shares = ctx.shares, None
        less = torch.full_like(ctx.place, -1, dtype=shares.dtype)
        shares.scatter_add_(-1, ctx.place, less)
        return shares.mul_(outer[0].where(ctx.is_asked, 0.0).unsqueeze(-1)), None, None


class _KnownGradients(torch.autograd.Function):
    """A number whose gradients are known."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.gradients = ctx.gradients, None
        return None, None, *(None if g is None else g.mul_(outer[0].to(g.dtype)) for g in held)
