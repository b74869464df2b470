"""Losses over many rows whose logits are never held together, and never computed twice.

A loss of n rows needs [n, V] logits per head, and as much again for their gradient. Here the
gradients of a chunk of rows are computed together with its loss, since the weight of every row in
the whole is known before, and are handed over in the backward pass of the whole: one forward and
one backward pass, where checkpointing takes two forward passes.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

ChunkLoss = Callable[[slice, Tensor], Tensor]


def chunked_sum(
    chunk_loss: ChunkLoss, rows: Tensor, size: int, trainable: Iterable[Tensor] = ()
) -> Tensor:
    """The sum, a float32 scalar, of chunk_loss(slice, rows[slice]) over slices of at most `size`
    rows.

    The gradients reach `rows` [n, ...] and those of `trainable` that require one, whatever else
    chunk_loss uses; none of these tensors may be computed from another. They are held until
    backward(), which may be called once.
    """
    is_wanted = torch.is_grad_enabled()
    inputs = [tensor for tensor in trainable if tensor.requires_grad and is_wanted]
    sums = _GradientSums(inputs, rows.requires_grad and is_wanted)
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, max(len(rows), 1), size):  # one chunk at least: it makes the gradients
        total += sums.add(chunk_loss, slice(start, start + size), rows)
    gradients = sums.gradients
    if sums.of_rows:
        inputs, gradients = [*inputs, rows], [*gradients, torch.cat(sums.of_rows)]
    return total if not inputs else _WithGradients.apply(total, gradients, *inputs)


class _GradientSums:
    """gradients: the sum so far for each of `inputs`; of_rows: the gradients of each chunk."""

    def __init__(self, inputs: list[Tensor], rows_need_it: bool) -> None:
        self._inputs, self._rows_need_it = inputs, rows_need_it
        self.gradients: list[Tensor | None] = [None] * len(inputs)
        self.of_rows: list[Tensor] = []

    def add(self, chunk_loss: ChunkLoss, chunk: slice, rows: Tensor) -> Tensor:
        """The loss [] of a chunk of rows [n, d], detached. Its graph is freed when this returns."""
        leaf = rows[chunk].detach().requires_grad_(self._rows_need_it)
        value = chunk_loss(chunk, leaf)
        inputs = [*self._inputs, leaf] if self._rows_need_it else self._inputs
        if not inputs:
            return value.detach()
        found = list(torch.autograd.grad(value, inputs, allow_unused=True))
        if self._rows_need_it:
            of_leaf = found.pop()
            self.of_rows.append(torch.zeros_like(leaf) if of_leaf is None else of_leaf)
        for index, old in enumerate(self.gradients):
            new, found[index] = found[index], None  # freed as soon as it is added
            if old is None:
                self.gradients[index] = new
            elif new is not None:
                old.add_(new)
        return value.detach()


class _WithGradients(torch.autograd.Function):
    """A value whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor | None], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.gradients = ctx.gradients, None
        return None, None, *(None if g is None else g.mul_(outer[0].to(g.dtype)) for g in held)
