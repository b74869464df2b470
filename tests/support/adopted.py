"""Kernels of ours as if a load had adopted them, on fake tensors: shapes, and how many launch."""

import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from medusa_chat.decoding.backends import split_attention
from medusa_chat.decoding.fused_layers import TORCH, LayerOps
from medusa_chat.decoding.kv_cache import Layer

KERNELS = "medusa_chat.decoding.backends.kernels"


def adopt_split_attention(patch: pytest.MonkeyPatch) -> Counter[str]:
    """Attention in splits runs on every device -> how often it was launched so far."""
    launched: Counter[str] = Counter()

    def run(query, key, value, words, scaling):
        launched.update(("split", "merge"))
        assert words.dim() == 2 and len(words) == query.shape[2]
        shape = 1, query.shape[2], query.shape[1], value.shape[3]
        return torch.empty(shape, dtype=query.dtype, device=query.device)

    patch.setitem(sys.modules, f"{KERNELS}.split", SimpleNamespace(run=run))
    patch.setattr(split_attention, "has_kernel", lambda *asked: True)
    return launched


def adopt_layer_kernels(patch: pytest.MonkeyPatch, *names: str) -> Counter[str]:
    """Merged layers that are made from now on call these kernels -> how many launched so far."""
    launched: Counter[str] = Counter()
    torch_turned = TORCH.turned

    def add_norm(hidden, delta, norm):
        launched["add_norm"] += 1
        return torch.empty_like(hidden), torch.empty_like(delta)

    def turned(qkv, cos, sin, heads, cache, index):
        if not isinstance(cache.layers[index], Layer):  # the pass that asks for shapes
            return torch_turned(qkv, cos, sin, heads, cache, index)
        launched["turned"] += 1
        key, value = cache.layers[index].read(rows := cos.shape[1])
        shape = 1, heads[0], rows, key.shape[-1]
        return torch.empty(shape, dtype=qkv.dtype, device=qkv.device), key, value

    def gated(gate_up):
        launched["gated"] += 1
        shape = *gate_up.shape[:-1], gate_up.shape[-1] // 2
        return torch.empty(shape, dtype=gate_up.dtype, device=gate_up.device)

    kernels = {"add_norm": add_norm, "turned": turned, "gated": gated}
    for name in names:
        patch.setattr(LayerOps, name, staticmethod(kernels[name]))
    return launched


def adopt_draw(backbone) -> Counter[str]:
    """A backbone's samples are drawn by the kernel -> how often it was launched so far."""
    launched: Counter[str] = Counter()

    def draw(scores, depths, deepest, place, seed):
        launched["draw"] += 1
        best, tokens = torch.empty(len(scores), 2), depths.new_empty(len(scores), 2)
        return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]

    backbone.rows.draw = draw
    return launched
