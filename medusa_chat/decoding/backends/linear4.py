"""Linears in 4 bits, as bitsandbytes holds them: merged side by side without any loss.

Packed bytes lie row after row, and blocks of 64 weights share a scale (absmax). Where a row is
whole blocks, rows of several linears in one tensor decode to the very same weights. With double
quantisation the scales are bytes relative to a mean of each linear: they are decoded once here,
by the operator that bitsandbytes itself decodes them with, and stay in fp32.

On a CPU with bf16 vectors bitsandbytes converts a linear to another layout at its first call, for a
product that is many times as fast. A converted linear can neither be merged nor saved, and the
conversion breaks one that is not whole blocks. So `hold` prevents it until loading is done, and
`release` allows it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn


def is_linear4(linear: nn.Module) -> bool:
    """Whether this is bitsandbytes' linear of 4 bits (known by name: nothing here imports it)."""
    return type(linear).__name__ == "Linear4bit"


def hold(model: nn.Module) -> None:
    """Keep the 4-bit linears of `model` in their present layout."""
    for linear in _linears(model):
        linear.support_avx512bf16_for_cpu = False


def release(model: nn.Module) -> list[str]:
    """Allow bitsandbytes to convert the linears that are whole blocks, on a CPU that gains by it;
    returns a sentence about it, or nothing."""
    released = 0
    for linear in _linears(model):
        state = getattr(linear.weight, "quant_state", None)
        if state is None:
            continue  # parts of a merged one have no weights
        able = type(linear)(1, 1, device="meta")  # a new one tells what the CPU supports
        is_whole = state.shape[0] % 32 == 0 and state.shape[1] % state.blocksize == 0
        if is_whole and getattr(able, "support_avx512bf16_for_cpu", False):
            linear.support_avx512bf16_for_cpu = True
            released += 1
    return [f"{released} linears of 4 bits laid out for this CPU's bf16"] if released else []


def _linears(model: nn.Module) -> Iterator[Any]:
    return filter(is_linear4, model.modules())


def can_merge(*linears: Any) -> bool:
    """Whether these 4-bit linears can be merged without loss: quantised in the same way, rows of
    whole blocks, and not converted to another layout."""
    states: list[Any] = [getattr(linear.weight, "quant_state", None) for linear in linears]
    if any(state is None or getattr(state, "packing_format_for_cpu", False) for state in states):
        return False
    sides = {
        (
            *(state.quant_type, state.blocksize, state.shape[1]),
            # decoded to fp32 first (as peft leaves them), they are rounded once all the same
            None if state.dtype in (torch.float32, linear.compute_dtype) else state.dtype,
            *(linear.compute_dtype, linear.weight.device, linear.bias is None),
        )
        for linear, state in zip(linears, states, strict=True)
    }
    is_whole = all(state.shape[1] % state.blocksize == 0 for state in states)
    is_bytes = all(linear.weight.dtype == torch.uint8 for linear in linears)
    return len(sides) == 1 and is_whole and is_bytes


def absmax(state: Any) -> Tensor:
    """The scale of each block, float32 [N * K / blocksize], decoded where it was quantised too."""
    scales: Tensor = state.absmax
    if state.nested:
        inner, decode = state.state2, torch.ops.bitsandbytes.dequantize_blockwise.default
        code = inner.code.to(scales.device)
        decoded = decode(scales, inner.absmax, code, inner.blocksize, inner.dtype)
        scales = decoded + state.offset
    return scales.float()


@torch.no_grad()
def merge4(*linears: Any) -> Any:
    """One 4-bit linear with the outputs of several side by side, for which `can_merge` holds. It
    holds copies of their weights; the caller frees the originals."""
    first, state = linears[0], linears[0].weight.quant_state
    sizes = [linear.out_features for linear in linears]
    whole = type(first)(
        first.in_features,
        sum(sizes),
        bias=False,
        compute_dtype=first.compute_dtype,
        quant_type=state.quant_type,
        device="meta",
    )
    merged = type(state)(
        absmax=torch.cat([absmax(linear.weight.quant_state) for linear in linears]),
        shape=torch.Size((sum(sizes), first.in_features)),
        code=state.code,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        dtype=first.compute_dtype or state.dtype,
    )
    whole.weight = type(first.weight)(
        torch.cat([linear.weight.data.reshape(-1, 1) for linear in linears]),
        requires_grad=False,
        quant_state=merged,
        blocksize=state.blocksize,
        compress_statistics=False,
        quant_type=state.quant_type,
        module=whole,
        bnb_quantized=True,
    )
    whole.quant_state = merged
    if first.bias is not None:
        whole.bias = nn.Parameter(torch.cat([x.bias.data for x in linears]), requires_grad=False)
    hold(whole)
    return whole.eval()  # in training mode bitsandbytes computes differently


@torch.no_grad()
def moved(linear: Any) -> Any:
    """The linear itself; one of 4 bits in memory of its own. While a model is quantised its weights
    fill what the 16-bit sources left, with parts between them that are merged later: memory that a
    GPU gets back only when everything in it is gone."""
    if is_linear4(linear):
        linear.weight.data = linear.weight.data.clone()
        state = linear.weight.quant_state
        state.absmax = state.absmax.clone()
    return linear
