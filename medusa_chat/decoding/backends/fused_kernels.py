"""Fused kernels: each replaces some torch operators of a step, and is adopted on its own.

Every load on a CUDA device tries each of them.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from medusa_chat.decoding import acceptance, fused_layers
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.parity import (
    TOLERANCES,
    agrees,
    largest,
    share,
)
from medusa_chat.decoding.fused_layers import FusedLayer
from medusa_chat.decoding.kv_cache import Layer

# by the function of fused_layers.LayerOps, then of acceptance.Rows: the note of a load
IN_LAYERS = {
    "add_norm": "residual sum and RMSNorm in one kernel",
    "turned": "rotation and cache in one kernel",
    "gated": "the gate in one kernel",
}
ON_LOGITS = {"draw": "samples and their noise in one kernel"}
NAMES = IN_LAYERS | ON_LOGITS
ROWS = (1, 16)  # of steps that they are timed at
CASES = ((1, True), (5, False), (16, True))  # rows compared, and whether at places of the device
CACHE, BEFORE = 96, 7  # positions of the cache in a trial, and of the text in it
LOGITS_OFF = 1e-4  # share of samples that are not torch's


@dataclass(frozen=True)
class Sizes:
    """The vocabulary of a model; of its merged layers the hidden size, heads H and H_kv, and the
    width of a head, of what is turned of it (0: of it all) and of the gate."""

    vocabulary: int
    hidden: int = 0
    heads: tuple[int, int] = (0, 0)
    width: int = 0
    gate: int = 0
    rotary: int = 0

    @classmethod
    def of(cls, vocabulary: int, layer: FusedLayer, rotary: int) -> "Sizes":
        gate, hidden = layer.config.intermediate_size, layer.before.weight.numel()
        return cls(vocabulary, hidden, layer.form.heads, layer.form.width, gate, rotary)


def use(name: str, backbone: Backbone) -> list[str]:
    """Let a backbone's merged layers, or what reads its logits, call the kernel `name`, in place,
    where it agrees with torch's operators and the timer measures it as faster; a sentence if so."""
    layers = [m for m in backbone.model.modules() if isinstance(m, FusedLayer)]
    size, device, dtype, limit = backbone.vocabulary, backbone.device, backbone.dtype, LOGITS_OFF
    sizes = Sizes(size)
    users: list[Any] = [backbone.rows]
    if name in IN_LAYERS:
        if not layers or dtype not in TOLERANCES:
            return []
        if not all(takes(name, layer) for layer in layers):
            return []
        rotary = 2 * backbone.model.get_decoder().rotary_emb.inv_freq.numel()
        sizes, limit = Sizes.of(size, layers[0], rotary), TOLERANCES[dtype]
        users = [layer.ops for layer in layers]
    off = partial(difference, name, sizes, device, dtype)
    instead = f"{NAMES[name]}: torch's operators instead"
    if not agrees(instead, off, limit):
        return []
    for user in users:
        setattr(user, name, kernel(name))
    return [NAMES[name]]


def takes(name: str, layer: FusedLayer) -> bool:
    """Whether the kernel `name` computes what this layer does at its place."""
    if name == "gated":
        return layer.form.gate == "silu"
    if name == "add_norm":
        return type(layer.before) is type(layer.after) is nn.RMSNorm
    return layer.form.is_turned and hasattr(layer.stock.self_attn, "head_dim")


def reference(name: str) -> Callable[..., Any]:
    """Torch's function of LayerOps or Rows."""
    references: Any = fused_layers.TORCH if name in IN_LAYERS else acceptance.TORCH
    call: Callable[..., Any] = getattr(references, name)
    return call


def kernel(name: str) -> Callable[..., Any]:
    """Our kernel that takes its place. Raises ImportError without Triton."""
    from medusa_chat.decoding.backends.kernels import fused

    call: Callable[..., Any] = getattr(fused, name)
    return call


def difference(name: str, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> float:
    """The kernel's largest difference from torch's operators in fp32 on random numbers, as a share
    of the largest; of tokens the share that is another one."""
    shares = []
    for rows, is_fixed in CASES:
        expected, ours = (
            _results(way, arguments(name, sizes, rows, device, dtype, wide, is_fixed))
            for way, wide in ((reference(name), torch.float32), (kernel(name), dtype))
        )
        shares += [_share(a, b) for a, b in zip(expected, ours, strict=True)]
    return largest(shares)


def _results(call: Callable[..., Any], given: tuple[Any, ...]) -> tuple[Tensor, ...]:
    results = call(*given)
    return (results,) if isinstance(results, Tensor) else results


def _share(expected: Tensor, ours: Tensor) -> float:
    if not expected.is_floating_point():
        return float((expected != ours).float().mean())
    return share(ours, expected)


def arguments(
    name: str,
    sizes: Sizes,
    rows: int,
    device: torch.device,
    dtype: torch.dtype,
    wide: torch.dtype,
    is_fixed: bool = True,
) -> tuple[Any, ...]:
    """Random arguments of a function of LayerOps or Rows: the same numbers at every call, rounded
    to `dtype`, as tensors of the dtype `wide`; scores are in fp32 always, a few of them left out,
    as top-p leaves them. is_fixed: with the cache of a recorded step."""
    generator = torch.Generator(device).manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype).to(wide)

    if name in ON_LOGITS:
        scores = 4 * torch.randn(rows, sizes.vocabulary, generator=generator, device=device)
        scores.masked_fill_(scores < -6, -torch.inf)
        place, seed = torch.tensor([99, 2**40 + 3], device=device).split(1)
        depths = torch.arange(rows, device=device) % 4
        return scores, depths, 3, place, seed
    if name == "add_norm":
        norm = nn.RMSNorm(sizes.hidden, 1e-5, device="meta")
        norm.weight = nn.Parameter(draw(sizes.hidden), requires_grad=False)
        return *draw(2, 1, rows, sizes.hidden), norm
    if name == "gated":
        return (draw(1, rows, 2 * sizes.gate),)
    keys, values = draw(2, 1, sizes.heads[1], CACHE, sizes.width)
    places = torch.arange(rows, device=device) + BEFORE
    layer = Layer(keys, values, places, CACHE) if is_fixed else Layer(keys, values)
    layer.start = 0 if is_fixed else BEFORE
    cache = Cache(layers=[layer])
    qkv = draw(1, rows, (sizes.heads[0] + 2 * sizes.heads[1]) * sizes.width)
    return qkv, *draw(2, 1, rows, sizes.rotary or sizes.width), sizes.heads, cache, 0
