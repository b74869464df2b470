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
    with_rows = rows.requires_grad and is_wanted
    gradients, of_rows = list[Tensor](), list[Tensor]()
    total = rows.new_zeros((), dtype=torch.float32)
    for start in range(0, max(len(rows), 1), size):  # one chunk at least: it makes the gradients
        chunk = slice(start, start + size)
        leaf = rows[chunk].detach().requires_grad_(with_rows)
        value = chunk_loss(chunk, leaf)
        total += value.detach()
        learning = [*inputs, leaf] if with_rows else inputs
        if not learning:
            continue
        found = list(torch.autograd.grad(value, learning, materialize_grads=True))
        if with_rows:
            of_rows.append(found.pop())
        gradients = [a.add_(b) for a, b in zip(gradients, found, strict=True)] if start else found
    if with_rows:
        inputs, gradients = [*inputs, rows], [*gradients, torch.cat(of_rows)]
    return total if not inputs else _WithGradients.apply(total, gradients, *inputs)


class _WithGradients(torch.autograd.Function):
    """A value whose gradients are computed already."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: list[Tensor], *_: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        held, ctx.gradients = ctx.gradients, None
        return None, None, *(gradient.mul_(outer[0].to(gradient.dtype)) for gradient in held)
