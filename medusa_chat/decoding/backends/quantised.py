"""Linears with weights of 4 or 8 bits, as bitsandbytes stores them: merged, and multiplied.

In 4 bits packed bytes lie row after row, and blocks of 64 weights share a scale (absmax). Where a
row is whole blocks, rows of several linears in one tensor decode to the very same weights. With
double quantisation the scales are bytes relative to a mean of each linear: they are decoded once
here, by the operator that bitsandbytes itself decodes them with, and stay in fp32.

On a CPU with bf16 vectors bitsandbytes converts a linear to another layout at its first call, for a
product that is many times as fast. A converted linear can neither be merged nor saved, and the
conversion breaks one that is not whole blocks. So `hold` prevents it until loading is done, and
`release` allows it.

Our kernel for few rows (kernels/products.py) is used where it agrees with its torch reference and
is known to be faster than what else a linear does (checkpoints/kernel_trial.py).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.kernels.products import TABLE, run
from medusa_chat.decoding.backends.parity import agrees, largest, share

BLOCK = 64  # weights that share a scale, in 4 bits
BUCKETS = (8, 16, 32, 64)  # rows at most, of each program
INSTEAD = {
    4: "4-bit products stay bitsandbytes'",
    8: "8-bit weights are unpacked in each step, which is slower than 16 bits",
}
LEAST_OUTPUTS = 32
MERGED = ("qkv", "out", "gate_up", "down")  # linears of a FusedLayer
TOLERANCE = 2e-2  # of half precision against its reference in fp32, of the largest output


def is_linear4(linear: nn.Module) -> bool:
    """Whether this is bitsandbytes' linear of 4 bits (known by name: nothing here imports it)."""
    return type(linear).__name__ == "Linear4bit"


def hold(model: nn.Module) -> None:
    """Keep the 4-bit linears of `model` in their present layout."""
    for linear in _linears4(model):
        linear.support_avx512bf16_for_cpu = False


def release(model: nn.Module) -> list[str]:
    """Allow bitsandbytes to convert the linears that are whole blocks, on a CPU that gains by it;
    returns a sentence about it, or nothing."""
    released = 0
    for linear in _linears4(model):
        state = getattr(linear.weight, "quant_state", None)
        if state is None:
            continue  # parts of a merged one have no weights
        able = type(linear)(1, 1, device="meta")  # a new one knows what the CPU supports
        is_whole = state.shape[0] % 32 == 0 and state.shape[1] % state.blocksize == 0
        if is_whole and getattr(able, "support_avx512bf16_for_cpu", False):
            linear.support_avx512bf16_for_cpu = True
            released += 1
    return [f"{released} linears of 4 bits converted for this CPU's bf16"] if released else []


def _linears4(model: nn.Module) -> Iterator[Any]:
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
def with_own_memory(linear: Any) -> Any:
    """The linear itself; one of 4 bits in memory of its own. While a model is quantised its weights
    fill what the 16-bit sources left, with parts between them that are merged later: memory that a
    GPU gets back only when everything in it is gone."""
    if is_linear4(linear):
        linear.weight.data = linear.weight.data.clone()
        state = linear.weight.quant_state
        state.absmax = state.absmax.clone()
    return linear


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
        dtype: torch.dtype | None = self.stock.compute_dtype
        return dtype


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
    """Replace each of bitsandbytes' linears of 8 bits by an Int8Linear, with weights in memory of
    its own (see with_own_memory). bitsandbytes' round activations too, so that a row's result
    depends on the rows beside it, and take many times as long."""
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


def use_products(
    model: nn.Module, dtype: torch.dtype, chosen: Mapping[int, frozenset[int]]
) -> list[str]:
    """Use our product in the model's quantised linears, in place, where it agrees with torch.
    dtype: of what they multiply. chosen: by bits, the BUCKETS of rows to use it for. Returns a
    sentence for each shape: the rows that got it, or what multiplies instead."""
    shapes: dict[tuple[int, ...], list[tuple[nn.Module, str, Any]]] = {}
    for parent, name, linear in _linears(model):
        shapes.setdefault(_shape(linear), []).append((parent, name, linear))
    notes = []
    for (outputs, inputs, bits), places in shapes.items():
        first = places[0][2]
        fits = outputs >= LEAST_OUTPUTS and inputs % BLOCK == 0
        device, given = _codes(first).device, first.compute_dtype or dtype
        is_used = fits and bool(chosen[bits]) and has_kernel(device, given, bits)
        rows = ", ".join(map(str, sorted(chosen[bits])))
        what = f"our {bits}-bit product for up to these rows: {rows}" if is_used else INSTEAD[bits]
        notes.append(f"{outputs} x {inputs}: {what}")
        for parent, name, linear in places if is_used else ():
            own = linear if isinstance(linear, Int8Linear) else Nf4Linear(linear)
            own.buckets = chosen[bits]
            setattr(parent, name, own)
    return notes


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every linear that our kernel may take: its parent module, its name there, and itself."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if isinstance(child, Int8Linear) or (name in MERGED and is_nf4(child)):
                yield parent, name, child


def _codes(linear: Any) -> Tensor:
    codes: Tensor = linear.codes if isinstance(linear, Int8Linear) else linear.weight.data
    return codes


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
    return share(run(codes, scales, x, bits), F.linear(x.float(), whole))


def decoded(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weights float32 [N, K] of NF4, as `Nf4Linear` has them: what our kernel multiplies by."""
    codes = torch.stack((packed >> 4, packed & 15), -1).reshape(-1, BLOCK)
    table = torch.tensor(TABLE, device=packed.device)
    return (table[codes.int()] * scales.view(-1, 1)).view(outputs, inputs)
