"""Triton kernels that replace several operators of a step; imported only where they will run."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_chat.decoding.acceptance import Position
from medusa_chat.decoding.backends.kernels import each_of
from medusa_chat.decoding.fused_layers import TORCH
from medusa_chat.decoding.kv_cache import Layer

GATE_BLOCK = 1024  # numbers of one program of `gated`
MOST_HEADS = 8  # of one program of `turned`
SCORES_BLOCK = 4096  # scores that a program of `draw` reads at once


@triton.jit
def _add_norm_kernel(hidden, delta, weight, summed, normed, epsilon, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * size
    d = tl.arange(0, block)
    inside = d < size
    x = tl.load(hidden + row + d, inside, 0.0)
    total = x.to(tl.float32) + tl.load(delta + row + d, inside, 0.0).to(tl.float32)
    total = total.to(x.dtype)  # rounded as it is stored
    tl.store(summed + row + d, total, inside)
    wide = total.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / size + epsilon)
    w = tl.load(weight + d, inside, 0.0).to(tl.float32)
    tl.store(normed + row + d, (wide * scale * w).to(x.dtype), inside)


@triton.jit(do_not_specialize=["start"])
def _turned_kernel(
    qkv,
    cos,
    sin,
    query,
    key,
    value,
    places,
    start,
    heads,
    key_heads,
    k_head,
    k_row,
    v_head,
    v_row,
    width,
    rotary,
    block_heads: tl.constexpr,
    block: tl.constexpr,
):
    """Some heads of one row: queries, keys and values, of which the first `rotary` numbers are
    turned. places: of the rows in the cache; None: they follow each other from `start` on."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * block_heads + tl.arange(0, block_heads)[:, None]
    d = tl.arange(0, block)[None, :]
    inside = (head < heads + 2 * key_heads) & (d < width)
    here = qkv + (row * (heads + 2 * key_heads) + head) * width
    x = tl.load(here + d, inside, 0.0)
    swapped = tl.load(here + (d + rotary // 2) % rotary, inside, 0.0).to(tl.float32)
    cosine = tl.load(cos + row * rotary + d, d < rotary, 1.0).to(tl.float32)
    sine = tl.load(sin + row * rotary + d, d < rotary, 0.0).to(tl.float32)
    moved = (x.to(tl.float32) * cosine + swapped * sine).to(x.dtype)
    if places is None:
        place = start + row
    else:
        place = tl.load(places + row)
    tl.store(query + (head * tl.num_programs(0) + row) * width + d, moved, inside & (head < heads))
    at = head - heads  # among the keys
    is_key = inside & (at >= 0) & (at < key_heads)
    tl.store(key + at.to(tl.int64) * k_head + place * k_row + d, moved, is_key)
    at -= key_heads
    tl.store(value + at.to(tl.int64) * v_head + place * v_row + d, x, inside & (at >= 0))


@triton.jit
def _gated_kernel(gate_up, out, size, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * block + tl.arange(0, block)
    inside = c < size
    gate = tl.load(gate_up + row * 2 * size + c, inside, 0.0)
    up = tl.load(gate_up + (row * 2 + 1) * size + c, inside, 0.0).to(tl.float32)
    wide = gate.to(tl.float32)
    tl.store(out + row * size + c, (wide / (1 + tl.exp(-wide)) * up).to(gate.dtype), inside)


def add_norm(hidden: Tensor, delta: Tensor, norm: torch.nn.RMSNorm) -> tuple[Tensor, Tensor]:
    """LayerOps.add_norm: hidden and delta [1, n, d] of one floating dtype -> their sum and its
    norm, [1, n, d] each in that dtype."""
    hidden, delta = hidden.contiguous(), delta.contiguous()
    summed, normed = torch.empty_like(hidden), torch.empty_like(hidden)
    size = hidden.shape[-1]
    _add_norm_kernel[(hidden.numel() // size,)](
        *(hidden, delta, norm.weight, summed, normed, norm.eps, size),
        block=triton.next_power_of_2(size),
        num_warps=8,
    )
    return summed, normed


def turned(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: tuple[int, int], cache: Any, index: int
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerOps.turned: qkv [1, n, (H + 2 H_kv) D], cos and sin [1, n, R] -> queries [1, H, n, D],
    keys and values [1, H_kv, s, D] to read, in the dtype of qkv. A pass without our cache is
    torch's."""
    layer = None if cache is None else cache.layers[index]
    if not isinstance(layer, Layer):
        return TORCH.turned(qkv, cos, sin, heads, cache, index)
    rows, rotary = cos.shape[1:]
    key, value = layer.read(rows)
    width = key.shape[-1]
    query = torch.empty(1, heads[0], rows, width, dtype=qkv.dtype, device=qkv.device)
    whole = heads[0] + 2 * heads[1]
    each = each_of(rows * whole, MOST_HEADS, qkv.device)
    _turned_kernel[(rows, triton.cdiv(whole, each))](
        *(qkv.contiguous(), cos.contiguous(), sin.contiguous(), query, key, value),
        *(layer.places, layer.start, *heads),
        *(key.stride(1), key.stride(2), value.stride(1), value.stride(2), width, rotary),
        block_heads=each,
        block=triton.next_power_of_2(width),
        num_warps=max(each // 2, 1),
    )
    return query, key, value


def gated(gate_up: Tensor) -> Tensor:
    """LayerOps.gated: [..., 2 f] -> [..., f] in the same dtype."""
    gate_up = gate_up.contiguous()
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    grid = out.numel() // size, triton.cdiv(size, GATE_BLOCK)
    _gated_kernel[grid](gate_up, out, size, block=GATE_BLOCK)
    return out


@triton.jit
def _mix(x):
    """acceptance._mix, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw_kernel(scores, depths, place, seed, best, tokens, size, block: tl.constexpr):
    """The largest of one block of a row's scores with noise, and where. The noise is written three
    times: acceptance.gumbel is the reference, draw.c and this are checked against it (this one by
    each load on a CUDA device and in test_kernels.py)."""
    row = tl.program_id(0).to(tl.int64)
    out = row * tl.num_programs(1) + tl.program_id(1)
    whole = tl.load(seed)
    position = (tl.load(place) + tl.load(depths + row)).to(tl.uint32)
    start = _mix(whole.to(tl.uint32) + 0x9E3779B9)
    high = _mix(start + (whole >> 32).to(tl.uint32))
    key = _mix(start ^ (_mix(position * 0x85EBCA77 + 1) + high))
    c = tl.program_id(1) * block + tl.arange(0, block)
    bits = _mix(_mix(c.to(tl.uint32) * 0x9E3779B1 + key) ^ _mix(key + 0x27D4EB2F))
    uniform = ((bits >> 9).to(tl.float32) + 0.5) * 1.1920928955078125e-07  # 2^-23
    x = tl.load(scores + row * size + c, c < size, -float("inf"))
    x -= tl.log(-tl.log(uniform))
    top = tl.max(x, 0)
    tl.store(best + out, top)
    tl.store(tokens + out, tl.min(tl.where(x == top, c, size - 1), 0))  # a token in any case


def draw(
    scores: Tensor, depths: Tensor, deepest: int, place: Position, seed: int | Tensor
) -> Tensor:
    """Rows.draw: scores [n, V] of any floating dtype, depths int64 [n], place and seed numbers or
    int64 [1] -> tokens int64 [n]."""
    rows, size = scores.shape
    blocks = triton.cdiv(size, SCORES_BLOCK)
    at, key = (
        x if isinstance(x, Tensor) else depths.new_full((1,), x)  # not copied from the host
        for x in (place, seed)
    )
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows, blocks, dtype=torch.long, device=scores.device)
    _draw_kernel[(rows, blocks)](
        *(scores.float().contiguous(), depths, at, key, best, tokens, size),
        block=SCORES_BLOCK,
        num_warps=8,
    )
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]
