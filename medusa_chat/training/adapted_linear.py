"""A frozen linear layer and its LoRA adapter as one step of autograd, for a CPU.

peft's own forward draws a dropout mask as large as the input, and passes over tensors as large as
input and output a dozen times for products that are small themselves: more time than the products.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def fuse_adapters(wrapped: Any) -> None:
    """Run every adapted nn.Linear of the decoder on a CPU by this module. wrapped: a peft model
    with one adapter. Parameters, names and what merges stay peft's."""
    from peft.tuners.lora import Linear

    for part in wrapped.get_base_model().get_decoder().modules():
        if type(part) is Linear and type(part.base_layer) is nn.Linear:
            if part.base_layer.weight.device.type == "cpu":
                part.forward = partial(_forward, part)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """x [..., in] -> [..., out] of its dtype."""
    base = layer.base_layer
    if layer.disable_adapters or layer.merged:
        found: Tensor = base(x)
        return found
    (name,) = layer.active_adapters
    dropout, scale = layer.lora_dropout[name], layer.scaling[name]
    rate = dropout.p if isinstance(dropout, nn.Dropout) and dropout.training else 0.0
    down, up = layer.lora_A[name].weight, layer.lora_B[name].weight
    found = _AdaptedLinear.apply(x, base.weight, base.bias, down, up, scale, rate)
    return found


def dropped(count: int, rate: float) -> Tensor:
    """int64 [m], rising: which of `count` values a dropout drops, each with probability `rate` by
    itself. The distances between them are drawn, which are geometric: for a small rate that is far
    fewer numbers than a mask has."""
    if not rate:
        return torch.empty(0, dtype=torch.long)
    expected = count * rate
    enough = int(expected + 10 * math.sqrt(expected) + 100)  # ten deviations
    places = torch.empty(enough, dtype=torch.long).geometric_(rate).cumsum_(0).sub_(1)
    return places[places < count]


def _without(rows: Tensor, places: Tensor) -> Tensor:
    """rows [n, d] with zeros at the places int64 [m] of their n x d values."""
    if not len(places):
        return rows
    found = rows.clone(memory_format=torch.contiguous_format)
    found.view(-1).index_fill_(0, places, 0.0)
    return found


class _AdaptedLinear(torch.autograd.Function):
    """x W' + bias + factor (dropped x) A' B' with A [r, in], B [out, r]. The adapter's products are
    in the dtype of x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        scale: float,
        rate: float,
    ) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        places, factor = dropped(rows.numel(), rate), scale / (1.0 - rate)
        inner = (_without(rows, places) @ down.T.to(x.dtype)).mul_(factor)
        found = F.linear(rows, weight, bias).addmm_(inner, up.T.to(x.dtype))
        ctx.save_for_backward(rows, weight, down, up, inner, places)
        ctx.factor = factor
        return found.view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, down, up, inner, places = ctx.saved_tensors
        outwards = outer[0].reshape(-1, len(weight))
        inwards = (outwards @ up.to(rows.dtype)).mul_(ctx.factor)
        of_up = (outwards.T @ inner).to(up.dtype)
        of_down = (inwards.T @ _without(rows, places)).to(down.dtype)
        of_rows = None
        if ctx.needs_input_grad[0]:
            of_rows = inwards @ down.to(rows.dtype)
            of_rows.view(-1).index_fill_(0, places, 0.0)
            of_rows = of_rows.addmm_(outwards, weight).view(*outer[0].shape[:-1], -1)
        return of_rows, None, None, of_down, of_up, None, None
