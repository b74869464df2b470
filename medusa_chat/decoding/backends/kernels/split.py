"""The Triton kernel of split attention; imported only where it is about to run."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_chat.decoding.backends.split_twin import SPLIT, merge

STAGES = 2  # of keys and values that are in shared memory at once
TILE_BYTES = 16_384  # of the keys of a tile


def tile_of(width: int, itemsize: int) -> tuple[int, int]:
    """The most rows and the keys of one tile, for heads of `width` numbers of `itemsize` bytes, so
    that its shared memory is within the 101,376 bytes of the smallest cards (sm_86, 89, 120)."""
    keys = min(64, TILE_BYTES // (width * itemsize))
    return min(keys, 64 if itemsize == 2 else 32), keys


@triton.jit
def _split_kernel(
    query,
    key,
    value,
    mask,
    out,
    sums,
    scaling,
    rows,
    total,
    keys,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    mask_row,
    split: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
):
    """One split of the keys for one tile of rows of one key-value head."""
    head = tl.program_id(0)
    part = tl.program_id(1)
    tile = tl.program_id(2)
    r = tile * block_rows + tl.arange(0, block_rows)
    d = tl.arange(0, width)
    q = tl.load(query + head * q_head + r[:, None] * q_row + d[None, :], r[:, None] < total, 0.0)
    top = tl.full([block_rows], -1e30, tl.float32)
    norm = tl.zeros([block_rows], tl.float32)
    acc = tl.zeros([block_rows, width], tl.float32)
    for start in range(0, split, block_keys):
        s = part * split + start + tl.arange(0, block_keys)
        inside = s < keys
        k = tl.load(key + head * k_head + s[:, None] * k_row + d[None, :], inside[:, None], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        allowed = (r[:, None] < total) & inside[None, :]
        bias = tl.load(mask + (r % rows)[:, None] * mask_row + s[None, :], allowed, -float("inf"))
        scores += bias.to(tl.float32)
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - best[:, None])
        fade = tl.exp(top - best)
        v = tl.load(value + head * v_head + s[:, None] * v_row + d[None, :], inside[:, None], 0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        norm = norm * fade + tl.sum(weights, 1)
        top = best
    at = (part * tl.num_programs(0) + head) * total + r
    acc = acc / tl.maximum(norm, 1e-30)[:, None]
    tl.store(out + at[:, None] * width + d[None, :], acc, r[:, None] < total)
    tl.store(sums + at, tl.where(norm > 0, top + tl.log(norm), -float("inf")), r < total)


def run(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
    """`split_attention` by the kernel. query [H, G * q, D] contiguous; key, value [H, s, D] and
    mask [q, s] with neighbouring last elements, fp32 or 16 bits each. D: 16, 32, 64, 128 or 256.
    Returns [H, G * q, D] in the dtype of `query`."""
    heads, total, width = query.shape
    keys, parts = key.shape[1], -(-key.shape[1] // SPLIT)
    assert query.stride(2) == key.stride(2) == value.stride(2) == mask.stride(1) == 1
    out = torch.empty(parts, heads, total, width, dtype=torch.float32, device=query.device)
    sums = torch.empty(parts, heads, total, 1, dtype=torch.float32, device=query.device)
    most, block_keys = tile_of(width, query.element_size())
    block_rows = max(16, min(most, 1 << (total - 1).bit_length()))
    _split_kernel[(heads, parts, -(-total // block_rows))](
        *(query, key, value, mask, out, sums, scaling, mask.shape[0], total, keys),
        *(query.stride(0), query.stride(1), key.stride(0), key.stride(1)),
        *(value.stride(0), value.stride(1), mask.stride(0)),
        split=SPLIT,
        block_rows=block_rows,
        block_keys=block_keys,
        width=width,
        num_stages=STAGES,
    )
    return merge(out, sums).to(query.dtype)
