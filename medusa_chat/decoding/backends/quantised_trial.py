"""The trial of our product of few rows with quantised weights.

Every load tries it, and it is used where it agrees with its torch reference and measures as faster
than what else a linear does."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.kernels.products import TABLE, run
from medusa_chat.decoding.backends.linear4 import is_linear4
from medusa_chat.decoding.backends.parity import Timer, agrees, is_faster, largest, share
from medusa_chat.decoding.backends.quantised_linear import (
    BLOCK,
    BUCKETS,
    Int8Linear,
    Nf4Linear,
    QuantisedLinear,
)

INSTEAD = {
    4: "4-bit products stay bitsandbytes'",
    8: "8-bit weights are unpacked in each step, which is slower than 16 bits",
}
LEAST_OUTPUTS = 32
MERGED = ("qkv", "out", "gate_up", "down")  # linears of a FusedLayer
TOLERANCE = 2e-2  # of half precision against its reference in fp32, of the largest output


def use_where_faster(model: nn.Module, dtype: torch.dtype, timer: Timer) -> list[str]:
    """Use our product in the model's quantised linears, in place, for the numbers of rows at which
    the timer measures it as faster. dtype: of what they multiply. Returns a sentence for each
    shape: the rows that got it, or what multiplies instead."""
    shapes: dict[tuple[int, ...], list[tuple[nn.Module, str, Any]]] = {}
    for parent, name, linear in _linears(model):
        shapes.setdefault(_shape(linear), []).append((parent, name, linear))
    notes = []
    for (outputs, inputs, bits), places in shapes.items():
        buckets = measure(_ours(places[0][2]), dtype, timer)
        rows = ", ".join(map(str, sorted(buckets)))
        what = f"our {bits}-bit product for up to these rows: {rows}" if rows else INSTEAD[bits]
        notes.append(f"{outputs} x {inputs}: {what}")
        for parent, name, linear in places if buckets else ():
            own = _ours(linear)
            own.buckets = buckets
            setattr(parent, name, own)
    return notes


def measure(linear: QuantisedLinear, dtype: torch.dtype, timer: Timer) -> frozenset[int]:
    """The buckets for which our kernel is faster than what else the linear does with rows in
    `dtype`, on its device; the first serves plain decoding's one row, too."""
    codes, faster = linear.codes, []
    dtype, (outputs, inputs) = linear.compute_dtype or dtype, linear.shape
    if outputs < LEAST_OUTPUTS or inputs % BLOCK:
        return frozenset()
    if not has_kernel(codes.device, dtype, linear.bits):
        return frozenset()
    for bucket in BUCKETS:
        pairs = []
        for rows in (1, bucket) if bucket == BUCKETS[0] else (bucket,):
            x = torch.randn(rows, inputs, device=codes.device).to(dtype)
            pairs.append((partial(linear.many, x), partial(linear.own, x)))
        if is_faster(pairs, timer):
            faster.append(bucket)
    return frozenset(faster)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every linear that our kernel may take: its parent module, its name there, and itself."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Int8Linear) or (name in MERGED and is_nf4(child)):
                yield parent, name, child


def _ours(linear: Any) -> QuantisedLinear:
    return linear if isinstance(linear, Int8Linear) else Nf4Linear(linear)


def _shape(linear: Any) -> tuple[int, ...]:
    """Outputs, inputs and bits."""
    if isinstance(linear, Int8Linear):
        return *linear.shape, linear.bits
    return *linear.weight.quant_state.shape, Nf4Linear.bits


def is_nf4(linear: Any) -> bool:
    """Whether this is bitsandbytes' linear of 4 bits as our kernel takes it."""
    state = getattr(linear.weight, "quant_state", None) if is_linear4(linear) else None
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return False
    is_known = (state.quant_type, state.blocksize) == ("nf4", BLOCK)
    return is_known and linear.weight.dtype == torch.uint8


@cache
def has_kernel(device: torch.device, dtype: torch.dtype, bits: int) -> bool:
    """Whether the kernel runs there and agrees with its reference; if not, that is logged, once."""
    if device.type != "cuda" or dtype.itemsize != 2:
        return False
    return agrees(INSTEAD[bits], lambda: difference(device, dtype, bits), TOLERANCE)


def difference(device: torch.device, dtype: torch.dtype, bits: int) -> float:
    """The kernel's largest difference from its reference in fp32 on random numbers, as a share of
    the largest output, over every program and over sizes that are no whole tiles."""
    generator = torch.Generator(device).manual_seed(0)
    sizes = [(1, 64, 64), (8, 96, 320), (16, 200, 1088), (17, 64, 128)]
    sizes += [(rows, 320, 2240) for rows in (1, 32, 33, 64)]
    return largest(off(run, generator, *size, dtype, bits) for size in sizes)


def off(
    run: Callable[..., Tensor],
    generator: torch.Generator,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
    bits: int,
) -> float:
    """The same for one size, of `run` as kernels/products.py has it."""
    device = generator.device
    x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
    if bits == 4:
        codes = torch.randint(256, (outputs * inputs // 2,), generator=generator, device=device)
        codes = codes.to(torch.uint8)
        scales = torch.rand(outputs * inputs // BLOCK, generator=generator, device=device) + 0.01
        whole = decoded(codes, scales, outputs, inputs)
    else:
        codes = torch.randint(-127, 128, (outputs, inputs), generator=generator, device=device)
        codes = codes.to(torch.int8)
        scales = torch.rand(outputs, generator=generator, device=device) + 0.01
        whole = codes * scales[:, None] / 127
    twin = F.linear(x.float(), whole)
    return share(run(codes, scales, x, bits), twin)


def decoded(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weights float32 [N, K] of NF4, as `Nf4Linear` has them: what our kernel multiplies by."""
    codes = torch.stack((packed >> 4, packed & 15), -1).reshape(-1, BLOCK)
    table = torch.tensor(TABLE, device=packed.device)
    return (table[codes.int()] * scales.view(-1, 1)).view(outputs, inputs)
