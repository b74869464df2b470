"""The Triton kernel that draws from rows of scores; imported only where it is about to run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_chat.decoding.acceptance import Position

BLOCK = 4096  # scores that are read at once


@triton.jit
def _mix(x):
    """acceptance._mix, on uint32."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _draw_kernel(scores, depths, place, seed, best, tokens, size, block: tl.constexpr):
    """The largest of one block of a row's scores with the noise of acceptance.gumbel, and where."""
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
    blocks = triton.cdiv(size, BLOCK)
    at, key = (
        x if isinstance(x, Tensor) else depths.new_full((1,), x)  # not copied from the host
        for x in (place, seed)
    )
    best = torch.empty(rows, blocks, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows, blocks, dtype=torch.long, device=scores.device)
    _draw_kernel[(rows, blocks)](
        *(scores.float().contiguous(), depths, at, key, best, tokens, size),
        block=BLOCK,
        num_warps=8,
    )
    return tokens.gather(1, best.argmax(1, keepdim=True))[:, 0]
