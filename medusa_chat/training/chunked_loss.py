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
DIVERGENCE_ROWS = 16  # rows of a divergence that are computed at a time


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


def cross_entropy(logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
    """logits float32 [..., V], wanted int64 [...] -> losses float32 [...] in nats, 0 where `wanted`
    is `ignored`.

    Half the passes over memory of torch's own. backward() may be called once: the gradient is
    computed in the memory of the probabilities. `logits` are not changed.
    """
    losses: Tensor = _CrossEntropy.apply(logits, wanted, ignored)
    return losses


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, wanted: Tensor, ignored: int) -> Tensor:
        is_wanted = wanted != ignored
        index = wanted.where(is_wanted, 0).unsqueeze(-1)
        largest, first = logits.max(-1, keepdim=True)
        probabilities = logits.softmax(-1)
        # the logarithm of the largest probability is exact; that of the wanted one may be log 0
        log_largest = probabilities.gather(-1, first).log()
        losses = (largest - logits.gather(-1, index)) - log_largest
        ctx.is_wanted, ctx.index, ctx.probabilities = is_wanted, index, probabilities
        return losses.squeeze(-1).where(is_wanted, 0.0)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None, None]:
        gradient, ctx.probabilities = ctx.probabilities, None
        minus_one = torch.full_like(ctx.index, -1, dtype=gradient.dtype)
        gradient.scatter_add_(-1, ctx.index, minus_one)
        return gradient.mul_(outer[0].where(ctx.is_wanted, 0.0).unsqueeze(-1)), None, None


def divergence(logits: Tensor, teacher: Tensor) -> Tensor:
    """The sum, a scalar in nats, of KL(softmax(teacher) || softmax(logits)) over rows of logits
    [n, V] each, both of one floating dtype. The teacher has no gradient.

    Less than half of the time of torch's own: the gradient alone is as large as the logits, all
    else is of a few rows and stays in a processor's cache. backward() may be called once.
    """
    found: Tensor = _Divergence.apply(logits, teacher)
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor) -> Tensor:
        ctx.gradient = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        total = logits.new_zeros(())
        for start in range(0, len(logits), DIVERGENCE_ROWS):
            part = slice(start, start + DIVERGENCE_ROWS)
            ours, theirs = logits[part].log_softmax(-1), teacher[part].log_softmax(-1)
            wanted = theirs.exp()
            total += theirs.sub_(ours).mul_(wanted).sum()
            if ctx.gradient is not None:
                torch.sub(ours.exp_(), wanted, out=ctx.gradient[part])
        return total

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, None]:
        gradient, ctx.gradient = ctx.gradient, None
        return gradient.mul_(outer[0]), None
