"""The kernels between a layer's products: each beside torch's operators, and adopted alone.

They were tested in Triton's interpreter and never ran on a GPU: every load tries each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.parity import TOLERANCES, Timer, agrees, largest
from medusa_chat.decoding.fused_layers import FusedLayer, FusedRMSNorm
from medusa_chat.decoding.kv_cache import FixedLayer
from medusa_chat.decoding.layer_ops import TORCH

NAMES = {  # of a function of LayerOps: what a load says
    "add_norm": "residual sum and RMSNorm in one kernel",
    "turned": "rotation and cache in one kernel",
    "gated": "the gate in one kernel",
}
ROWS = (1, 16)  # of steps that they are timed at
GAIN, LOSS = 1.05, 0.98  # times as fast: at one of ROWS, and at every one
CACHE = 96  # positions of the cache in a trial


@dataclass(frozen=True)
class Sizes:
    """Of a model's layers: the hidden size, heads H and H_kv, a head's width, and the gate's."""

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
    if not agrees(instead, lambda: difference(name, sizes, device, dtype), TOLERANCES[dtype]):
        return []
    gains = [_gain(name, sizes, rows, device, dtype, timer) for rows in ROWS]
    if not (min(gains) >= LOSS and max(gains) >= GAIN):
        return []
    for layer in layers:
        layer.ops = replace(layer.ops, **{name: kernel(name)})
    return [NAMES[name]]


def kernel(name: str) -> Callable[..., Any]:
    """The kernel that stands for a function of LayerOps. Raises ImportError without Triton."""
    from medusa_chat.decoding.backends.kernels import layers

    found: Callable[..., Any] = getattr(layers, name)
    return found


def difference(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """The kernel's largest difference from torch's operators in fp32 on random numbers, as a share
    of the largest."""
    ways = (kernel(name), dtype), (getattr(TORCH, name), torch.float32)
    shares = []
    for rows in (1, 5, 16):
        found, wanted = (
            _results(call, arguments(name, sizes, rows, device, dtype, wide)) for call, wide in ways
        )
        pairs = zip(found, wanted, strict=True)
        shares += [float((a.float() - b).abs().max() / b.abs().max()) for a, b in pairs]
    return largest(shares)


def _results(call: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    found = call(*given)
    return (found,) if isinstance(found, Tensor) else found


def _gain(
    name: str, sizes: Sizes, rows: int, device: torch.device, dtype: torch.dtype, timer: Timer
) -> float:
    """How many times as fast as torch's operators the kernel is."""
    given = arguments(name, sizes, rows, device, dtype, dtype)
    plain, own = (timer(partial(call, *given)) for call in (getattr(TORCH, name), kernel(name)))
    return plain / own


def arguments(
    name: str,
    sizes: Sizes,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
) -> tuple[Any, ...]:
    """Random arguments of a function of LayerOps: the same numbers at every call, rounded to
    `dtype`, as tensors of the dtype `wide`."""
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).to(wide)

    if name == "add_norm":
        norm = SimpleNamespace(weight=draw(sizes.hidden), variance_epsilon=1e-5)
        return *draw(2, 1, rows, sizes.hidden), FusedRMSNorm(norm)
    if name == "gated":
        return (draw(1, rows, 2 * sizes.gate),)
    keys, values = draw(2, 1, sizes.heads[1], CACHE, sizes.width)
    places = torch.arange(rows, device=device) + 7
    cache = Cache(layers=[FixedLayer(keys, values, places, CACHE)])
    qkv = draw(1, rows, (sizes.heads[0] + 2 * sizes.heads[1]) * sizes.width)
    return qkv, *draw(2, 1, rows, sizes.width), sizes.heads, cache, 0
