"""Nf4Linear: products of few rows with NF4 weights by a Triton kernel, and its torch reference.

Every load tries the kernel, and `replace_where_faster` uses it where it measures as faster than
bitsandbytes.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.backends.linear4 import absmax, is_linear4
from medusa_chat.decoding.backends.nf4_tiles import BLOCK, BUCKETS, OUTPUTS, TABLE, Tiles
from medusa_chat.decoding.backends.parity import GAIN, Timer, agrees, largest

TOLERANCE = 2e-2  # of half precision against its reference in fp32, of the largest output


def repack(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tiles:
    """Tiles from bitsandbytes' layout: packed uint8 [N * K / 2], weights [N, K] row by row, the
    first of a pair in the high half; scales [N * K / 64]. outputs: N; inputs: K, whole blocks of
    64."""
    whole = packed.reshape(outputs, inputs // 2)
    weights = torch.stack((whole >> 4, whole & 15), -1).reshape(outputs, inputs // BLOCK, BLOCK)
    below, beside = -outputs % OUTPUTS, (inputs // BLOCK) % 2
    weights = F.pad(weights, (0, 0, 0, beside, 0, below))
    weights = weights.unflatten(0, (-1, OUTPUTS)).unflatten(2, (-1, 2)).transpose(1, 2)
    codes = (weights[..., 0, :] | weights[..., 1, :] << 4).contiguous()
    padded = F.pad(scales.float().reshape(outputs, -1), (0, beside, 0, below))
    padded = padded.unflatten(0, (-1, OUTPUTS)).unflatten(2, (-1, 2)).permute(0, 2, 3, 1)
    return Tiles(codes, padded.contiguous(), outputs, inputs)


def decoded(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weights float32 [N, K] in bitsandbytes' layout, as `repack` takes it: what the kernel
    multiplies by."""
    codes = torch.stack((packed >> 4, packed & 15), -1).reshape(-1, BLOCK)
    table = torch.tensor(TABLE, device=packed.device)
    return (table[codes.int()] * scales.view(-1, 1)).view(outputs, inputs)


def bucket_of(rows: int) -> int | None:
    """The kernel's bucket for so many rows; None where the kernel is not used for them."""
    return next((size for size in BUCKETS if rows <= size), None)


class Nf4Linear(nn.Module):
    """bitsandbytes' linear, with our kernel for the `buckets` of rows; [..., K] -> [..., N].

    It holds the weights twice: other numbers of rows need them in bitsandbytes' layout.
    """

    def __init__(self, linear: Any, buckets: frozenset[int]) -> None:
        super().__init__()
        tiles = tiles_of(linear)
        self.stock, self.buckets = linear, buckets
        self.sizes = tiles.outputs, tiles.inputs
        self.codes: Tensor
        self.scales: Tensor
        self.register_buffer("codes", tiles.codes, persistent=False)
        self.register_buffer("scales", tiles.scales, persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N] in its dtype."""
        if bucket_of(hidden.numel() // hidden.shape[-1]) not in self.buckets:
            out: Tensor = self.stock(hidden)
            return out
        return self.own(hidden)

    def own(self, hidden: Tensor) -> Tensor:
        """[..., K] -> [..., N] of the same dtype by the kernel, for 1 to 64 rows."""
        from medusa_chat.decoding.backends.kernels.nf4 import run

        x = hidden.reshape(-1, hidden.shape[-1]).to(self.stock.compute_dtype or hidden.dtype)
        out: Tensor = run(Tiles(self.codes, self.scales, *self.sizes), x.contiguous())
        if self.stock.bias is not None:
            out = out + self.stock.bias.to(out.dtype)
        whole: Tensor = out.unflatten(0, hidden.shape[:-1])
        return whole.to(hidden.dtype)


def tiles_of(linear: Any) -> Tiles:
    """The weights of a linear for which `is_nf4` holds, as tiles."""
    state = linear.weight.quant_state
    return repack(linear.weight.data, absmax(state), *state.shape)


def is_nf4(linear: Any) -> bool:
    """Whether `repack` supports this linear's weights."""
    state = getattr(linear.weight, "quant_state", None) if is_linear4(linear) else None
    if state is None or getattr(state, "packing_format_for_cpu", False):
        return False
    is_known = (state.quant_type, state.blocksize) == ("nf4", BLOCK)
    return is_known and state.shape[1] % BLOCK == 0 and linear.weight.dtype == torch.uint8


def replace_where_faster(model: nn.Module, timer: Timer, free: int) -> list[str]:
    """Use our kernel in the model's 4-bit linears, in place, for the numbers of rows at which the
    timer measures it as faster. free: bytes that their second copies may take, of linears of one
    shape together. Returns a sentence for each shape that got it."""
    shapes: dict[tuple[int, int], list[tuple[nn.Module, str, Any]]] = {}
    for parent, name, linear in _linears(model):
        if not has_kernel(linear.weight.device, linear.compute_dtype or torch.float16):
            return ["no kernel of ours for 4-bit products here"]
        shapes.setdefault(linear.weight.quant_state.shape, []).append((parent, name, linear))
    notes = []
    for (outputs, inputs), places in shapes.items():
        size = len(places) * _tile_bytes(outputs, inputs)
        buckets = measure(places[0][2], timer) if size <= free else frozenset()
        if buckets:
            free -= size
            rows = ", ".join(map(str, sorted(buckets)))
            notes.append(f"{outputs} x {inputs}: our 4-bit product for up to these rows: {rows}")
        for parent, name, linear in places if buckets else ():
            setattr(parent, name, Nf4Linear(linear, buckets))
    return notes


def _tile_bytes(outputs: int, inputs: int) -> int:
    """Bytes of the tiles of a linear: half a byte a weight and a scale in fp32 a block."""
    rows, blocks = outputs + -outputs % OUTPUTS, inputs // BLOCK + inputs // BLOCK % 2
    return rows * blocks * (BLOCK // 2 + 4)


def measure(linear: Any, timer: Timer) -> frozenset[int]:
    """The buckets for which our kernel is faster than bitsandbytes on this linear's device."""
    own, faster = Nf4Linear(linear, frozenset(BUCKETS)), []
    dtype = linear.compute_dtype or torch.float16
    for rows in BUCKETS:
        x = torch.randn(rows, linear.in_features, device=linear.weight.device, dtype=dtype)
        if timer(partial(own, x)) * GAIN < timer(partial(linear, x)):
            faster.append(rows)
    return frozenset(faster)


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, Any]]:
    """Every linear that the kernel supports: its parent module, its name there, and itself."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if name in ("qkv", "out", "gate_up", "down") and is_nf4(child):
                yield parent, name, child


@cache
def has_kernel(device: torch.device, dtype: torch.dtype = torch.float16) -> bool:
    """Whether the kernel runs there and agrees with its reference; if not, that is logged, once."""
    if device.type != "cuda":
        return False
    instead = "4-bit products stay bitsandbytes'"
    return agrees(instead, lambda: difference(device, dtype), TOLERANCE)


def difference(device: torch.device, dtype: torch.dtype = torch.float16) -> float:
    """The kernel's largest difference from its reference in fp32 on random numbers, as a share of
    the largest output, over every bucket and over sizes that are no whole tiles."""
    from medusa_chat.decoding.backends.kernels.nf4 import run

    generator = torch.Generator(device).manual_seed(0)
    sizes = [(1, 64, 64), (8, 96, 320), (16, 200, 1088), (17, 64, 128)]
    sizes += [(rows, 320, 1408) for rows in (32, 33, 64)]
    return largest(_off(run, generator, *size, dtype) for size in sizes)


def _off(
    run: Callable[..., Tensor],
    generator: torch.Generator,
    rows: int,
    outputs: int,
    inputs: int,
    dtype: torch.dtype,
) -> float:
    device = generator.device
    size = outputs * inputs
    packed = torch.randint(256, (size // 2,), generator=generator, device=device).to(torch.uint8)
    scales = torch.rand(size // BLOCK, generator=generator, device=device) + 0.01
    tiles = repack(packed, scales, outputs, inputs)
    x = torch.randn(rows, inputs, generator=generator, device=device).to(dtype)
    twin = F.linear(x.float(), decoded(packed, scales, outputs, inputs))
    return float((run(tiles, x).float() - twin).abs().max() / twin.abs().max())
