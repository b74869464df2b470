"""The kernels between a layer's products: each beside torch's operators, and adopted alone.

They were tested in Triton's interpreter and never ran on a GPU: every load tries each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.kernels import kernel
from medusa_chat.decoding.backends.parity import TOLERANCES, Timer, largest, pays
from medusa_chat.decoding.fused_layers import TORCH, FusedLayer, FusedRMSNorm
from medusa_chat.decoding.kv_cache import FixedLayer, Layer

NAMES = {  # of a function of LayerOps: what a load says
    "add_norm": "residual sum and RMSNorm in one kernel",
    "turned": "rotation and cache in one kernel",
    "gated": "the gate in one kernel",
}
ROWS = (1, 16)  # of steps that they are timed at
CASES = ((1, True), (5, False), (16, True))  # rows compared, and whether at places of the device
CACHE, BEFORE = 96, 7  # positions of the cache in a trial, and of the text in it


@dataclass(frozen=True)
class Sizes:
    """Sizes of a layer: hidden size, heads H and H_kv, the width of a head and of the gate."""

    hidden: int
    heads: tuple[int, int]
    width: int
    gate: int

    @classmethod
    def of(cls, layer: FusedLayer) -> "Sizes":
        gate = layer.config.intermediate_size
        return cls(layer.before.weight.numel(), layer.heads, layer.head_dim, gate)


def use_where_faster(name: str, backbone: Backbone, timer: Timer) -> list[str]:
    """Let the merged layers of a backbone call the kernel `name`, in place, where it agrees with
    torch's operators and the timer measures it as faster; a sentence if so."""
    layers = [m for m in backbone.model.modules() if isinstance(m, FusedLayer)]
    if not layers or backbone.dtype not in TOLERANCES:
        return []
    sizes, device, dtype = Sizes.of(layers[0]), backbone.device, backbone.dtype
    instead = f"{NAMES[name]}: torch's operators instead"
    off = partial(difference, name, sizes, device, dtype)
    pairs = (
        tuple(
            partial(way, *arguments(name, sizes, rows, device, dtype, dtype)) for way in ways(name)
        )
        for rows in ROWS
    )
    if not pays(instead, off, TOLERANCES[dtype], pairs, timer):
        return []
    for layer in layers:
        setattr(layer.ops, name, kernel("layers", name))
    return [NAMES[name]]


def ways(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's function of LayerOps, and ours."""
    return getattr(TORCH, name), kernel("layers", name)


def difference(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """The kernel's largest difference from torch's operators in fp32 on random numbers, as a share
    of the largest."""
    shares = []
    for rows, is_fixed in CASES:
        wanted, found = (
            _results(way, arguments(name, sizes, rows, device, dtype, wide, is_fixed))
            for way, wide in zip(ways(name), (torch.float32, dtype), strict=True)
        )
        pairs = zip(wanted, found, strict=True)
        shares += [float((a - b.float()).abs().max() / a.abs().max()) for a, b in pairs]
    return largest(shares)


def _results(call: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    found = call(*given)
    return (found,) if isinstance(found, Tensor) else found


def arguments(
    name: str,
    sizes: Sizes,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
    is_fixed: bool = True,
) -> tuple[Any, ...]:
    """Random arguments of a function of LayerOps: the same numbers at every call, rounded to
    `dtype`, as tensors of the dtype `wide`. is_fixed: with the cache of a recorded step."""
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).to(wide)

    if name == "add_norm":
        norm = SimpleNamespace(weight=draw(sizes.hidden), variance_epsilon=1e-5)
        return *draw(2, 1, rows, sizes.hidden), FusedRMSNorm(norm)
    if name == "gated":
        return (draw(1, rows, 2 * sizes.gate),)
    keys, values = draw(2, 1, sizes.heads[1], CACHE, sizes.width)
    places = torch.arange(rows, device=device) + BEFORE
    layer = FixedLayer(keys, values, places, CACHE) if is_fixed else Layer(keys, values)
    layer.start = 0 if is_fixed else BEFORE
    cache = Cache(layers=[layer])
    qkv = draw(1, rows, (sizes.heads[0] + 2 * sizes.heads[1]) * sizes.width)
    return qkv, *draw(2, 1, rows, sizes.width), sizes.heads, cache, 0
