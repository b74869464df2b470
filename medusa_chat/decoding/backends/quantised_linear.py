"""Linears with weights of 4 or 8 bits as bitsandbytes has them, and our product for few rows.

quantised_trial.py says where it is used."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.kernels.products import run
from medusa_chat.decoding.backends.linear4 import absmax

BLOCK = 64  # weights that share a scale, in 4 bits
BUCKETS = (8, 16, 32, 64)  # rows at most, of each program


class QuantisedLinear(nn.Module, ABC):
    """Our product of up to 64 rows with weights of `bits` bits, for the numbers of rows in
    `buckets`; `many` for all others. [..., K] -> [..., N]; shape: N, K. codes and scales: as
    kernels/products.py takes them; bias: [N] or None."""

    bits: int
    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.buckets: frozenset[int] = frozenset()

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N] in its dtype."""
        is_own = bucket_of(hidden.numel() // hidden.shape[-1]) in self.buckets
        return self.own(hidden) if is_own else self.many(hidden)

    def own(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N] of the same dtype by our kernel, for 1 to 64 rows."""
        x = hidden.reshape(-1, hidden.shape[-1]).to(self.compute_dtype or hidden.dtype)
        out = run(self.codes, self.scales, x.contiguous(), self.bits)
        if self.bias is not None:
            out = out + self.bias.to(out.dtype)
        whole: Tensor = out.unflatten(0, hidden.shape[:-1])
        return whole.to(hidden.dtype)

    @abstractmethod
    def many(self, hidden: Tensor) -> Tensor:
        """The same for any number of rows."""

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """In which products are computed; None for that of the input."""
        return None


class Nf4Linear(QuantisedLinear):
    """bitsandbytes' linear of 4 bits, which it calls for many rows."""

    bits = 4

    def __init__(self, linear: Any) -> None:
        state = linear.weight.quant_state
        super().__init__(state.shape)
        if state.nested:  # decoded once, for both
            state.absmax, state.nested, state.state2 = absmax(state), False, None
        self.stock = linear
        self.codes, self.scales = linear.weight.data, state.absmax
        self.bias = None if linear.bias is None else linear.bias.data

    def many(self, hidden: Tensor) -> Tensor:
        """See QuantisedLinear."""
        out: Tensor = self.stock(hidden)
        return out

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """See QuantisedLinear; bitsandbytes sets it at the first call."""
        found: torch.dtype | None = self.stock.compute_dtype
        return found


class Int8Linear(QuantisedLinear):
    """A linear with weights as bitsandbytes rounds them to 8 bits, and unrounded activations; for
    many rows the weights are written out in 16 bits. codes: int8 [N, K]; scales: fp32 [N], of which
    a 127th counts; bias: [N] or None."""

    bits = 8

    def __init__(self, codes: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        super().__init__(codes.shape)
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", bias, persistent=False)

    def many(self, hidden: Tensor) -> Tensor:
        """See QuantisedLinear."""
        whole = torch.empty_like(self.codes, dtype=hidden.dtype)
        torch.mul(self.codes, self.scales[:, None] / 127, out=whole)
        return F.linear(hidden, whole, None if self.bias is None else self.bias.to(hidden.dtype))


def take_int8(model: nn.Module) -> None:
    """Put an Int8Linear in the place of each of bitsandbytes' linears of 8 bits, with weights in
    memory of its own (see linear4.moved). Those round activations, too, which of two equal rows in
    other company gives other results, and take many times as long."""
    for name, linear in list(model.named_modules()):
        if type(linear).__name__ == "Linear8bitLt":
            held: Any = linear.weight if linear.weight.SCB is not None else linear.state
            codes = held.CB.clone() if held.CB is not None else linear.weight.data.clone()
            bias = None if linear.bias is None else linear.bias.data
            model.set_submodule(name, Int8Linear(codes, held.SCB.clone(), bias))


def merge8(*linears: Int8Linear) -> Int8Linear:
    """One linear with the outputs of several side by side, with copies of their weights."""
    biases = [linear.bias for linear in linears if linear.bias is not None]
    return Int8Linear(
        torch.cat([linear.codes for linear in linears]),
        torch.cat([linear.scales for linear in linears]),
        torch.cat(biases) if biases else None,
    )


def bucket_of(rows: int) -> int | None:
    """The kernel's bucket for so many rows; None where the kernel is not used for them."""
    return next((size for size in BUCKETS if rows <= size), None)
