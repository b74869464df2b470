"""LayerOps: the operators between the products of a merged layer, by torch.

A load on a CUDA device replaces them one by one by kernels (backends/layer_kernels.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Three = tuple[Tensor, Tensor, Tensor]


def add_norm(hidden: Tensor, delta: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """hidden and delta [1, n, d], norm a FusedRMSNorm -> their sum, and its norm, in
    their dtype."""
    hidden = hidden + delta
    return hidden, norm(hidden)


def turned(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], cache: Any, index: int
) -> Three:
    """Rotate queries and keys by their positions, and write keys and values to the cache.

    qkv [1, n, (H + 2 H_kv) D]; cos and sin [1, n, D], the sign of rotate_half in sin; heads: H and
    H_kv; index: of the layer in the cache (or None) -> queries [1, H, n, D], and keys and values
    [1, H_kv, s, D] to read, in the dtype of qkv.
    """
    split = qkv.unflatten(-1, (-1, cos.shape[-1])).transpose(1, 2)  # [1, H + 2 H_kv, n, D]
    moved = split[:, : sum(heads)]
    swapped = torch.roll(moved, cos.shape[-1] // 2, -1)
    query, key = torch.addcmul(moved * cos, swapped, sin).split(heads, 1)
    value = split[:, sum(heads) :]
    if cache is not None:
        key, value = cache.update(key, value, index)
    return query, key, value


def gated(gate_up: Tensor) -> Tensor:
    """[..., 2 f], the gate's numbers first -> silu(gate) * up, [..., f] in the same dtype."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class LayerOps:
    """What a merged layer calls, each by the name of its function above."""

    add_norm: Callable[[Tensor, Tensor, Any], tuple[Tensor, Tensor]] = add_norm
    turned: Callable[[Tensor, Tensor, Tensor, tuple[int, int], Any, int], Three] = turned
    gated: Callable[[Tensor], Tensor] = gated


TORCH = LayerOps()
