"""The Triton kernel of attention in parts; imported only where it is about to run."""

from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_chat.decoding.backends.kernels import each_of, processors

STAGES = 2  # of keys and values that are in shared memory at once
TILE_BYTES = 16_384  # of the keys of a tile
PER_PROCESSOR = 2  # programs for each multiprocessor of the device
MOST_PARTS = 32  # of the keys; the last one is the draft
MERGED = 8192  # numbers of parts that a program merges at once
LOG2_E = log2(e)


def tile_of(width: int, itemsize: int) -> tuple[int, int]:
    """The most rows and the keys of one tile, for heads of `width` numbers of `itemsize` bytes, so
    that its shared memory is within the 101,376 bytes of the smallest cards (sm_86, 89, 120). Keys
    divide 64, so that one word of a node mask holds all nodes of a tile."""
    keys = min(64, TILE_BYTES // (width * itemsize))
    return min(keys, 64 if itemsize == 2 else 32), keys


@triton.jit
def _read(
    state,
    q,
    key,
    value,
    words,
    low,
    begin,
    end,
    length,
    is_row,
    k_row,
    v_row,
    scaling,
    is_draft: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
):
    """Attention state (largest score, sum of weights, weighted values; base 2) after the keys from
    `begin` to `end`: the draft's own, that its words name, or a text's, from `low` on."""
    top, norm, acc = state
    d = tl.arange(0, width)
    for start in range(begin, end, block_keys):
        s = start + tl.arange(0, block_keys)
        inside = s < end
        at = s.to(tl.int64)[:, None]
        k = tl.load(key + at * k_row + d[None, :], inside[:, None], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if is_draft:
            word = tl.load(words + 2 + (start - length) // 64, is_row, 0)
            bit = (word[:, None] >> ((s - length) & 63).to(tl.int64)[None, :]) & 1
            seen = (bit != 0) & inside[None, :]
        else:
            seen = (s[None, :] >= low[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - best[:, None])
        fade = tl.exp2(top - best)
        v = tl.load(value + at * v_row + d[None, :], inside[:, None], 0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        norm = norm * fade + tl.sum(weights, 1)
        top = best
    return top, norm, acc


@triton.jit
def _split_kernel(
    query,
    key,
    value,
    words,
    out,
    sums,
    scaling,
    rows,
    total,
    q_head,
    q_row,
    k_head,
    k_row,
    v_head,
    v_row,
    word_row,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    width: tl.constexpr,
):
    """One part of the keys for one tile of rows of one key head: `total` rows, those of its groups
    under each other. The last part is the draft's own nodes; the others share the text, whose
    length is read here. What a row sees nothing of is not written."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    parts = tl.num_programs(1)
    is_draft = part == parts - 1
    r = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    is_row = r < total
    node = r % rows
    at = head * total + r  # among the rows of all heads
    d = tl.arange(0, width)
    mine = words + node * word_row

    length = tl.load(words + 1).to(tl.int32)
    first = tl.maximum(tl.load(words), 0).to(tl.int32)  # the root's, the lowest
    blocks = tl.cdiv(tl.maximum(length - first, 0), block_keys)
    share = tl.cdiv(blocks, parts - 1) * block_keys
    begin = first + part * share
    low = tl.maximum(tl.load(mine, is_row, 0), 0).to(tl.int32)

    q_at = query + (at // rows) * q_head + node * q_row
    q = tl.load(q_at[:, None] + d[None, :], is_row[:, None], 0.0)
    k_at, v_at = key + head * k_head, value + head * v_head
    top = tl.full([block_rows], -1e30, tl.float32)
    norm = tl.zeros([block_rows], tl.float32)
    acc = tl.zeros([block_rows, width], tl.float32)
    state = (top, norm, acc)
    if is_draft:
        top, norm, acc = _read(
            *(state, q, k_at, v_at, mine, low, length, length + rows, length, is_row),
            *(k_row, v_row, scaling, True, block_keys, width),
        )
    else:
        top, norm, acc = _read(
            *(state, q, k_at, v_at, mine, low, begin, tl.minimum(begin + share, length)),
            *(length, is_row, k_row, v_row, scaling, False, block_keys, width),
        )
    whole = tl.num_programs(0).to(tl.int64) * total  # rows of all heads, of one part
    has_seen = norm > 0
    norm = tl.where(has_seen, norm, 1.0)
    here = at + part * whole
    there = out + here[:, None] * width + d[None, :]
    tl.store(there, acc / norm[:, None], (is_row & has_seen)[:, None])
    tl.store(sums + here, tl.where(has_seen, top + tl.log2(norm), -float("inf")), is_row)


@triton.jit
def _merge_kernel(
    out,
    sums,
    merged,
    whole,
    rows,
    parts,
    block_rows: tl.constexpr,
    block_parts: tl.constexpr,
    width: tl.constexpr,
):
    """The parts of some rows of all `whole`, those of every head, by their logs of sums."""
    at = tl.program_id(0) * block_rows + tl.arange(0, block_rows)
    is_row = at < whole
    part = tl.arange(0, block_parts)
    d = tl.arange(0, width)
    here = part.to(tl.int64)[None, :] * whole + at[:, None]
    log = tl.load(sums + here, is_row[:, None] & (part < parts)[None, :], -float("inf"))
    top = tl.where(is_row, tl.max(log, 1), 0.0)
    share = tl.exp2(log - top[:, None])
    has_seen = (log > -float("inf"))[:, :, None]
    values = tl.load(out + here[:, :, None] * width + d[None, None, :], has_seen, 0.0)
    mixed = tl.sum(values * share[:, :, None], 1) / tl.sum(share, 1)[:, None]
    row = (at % rows) * (whole // rows) + at // rows  # [n, H]
    tl.store(merged + row[:, None] * width + d[None, :], mixed, is_row[:, None])


def run(query: Tensor, key: Tensor, value: Tensor, words: Tensor, scaling: float) -> Tensor:
    """Attention of query [1, H, n, D] over key and value [1, H_kv, any, D], all of one dtype and
    with neighbouring last elements, by a node mask int64 [n, 2 + w] -> [1, n, H, D] of that dtype.
    D: 16, 32, 64, 128 or 256."""
    heads, rows, width = query.shape[1:]
    key_heads, total = key.shape[1], heads // key.shape[1] * rows
    assert query.stride(3) == key.stride(3) == value.stride(3) == words.stride(1) == 1
    most, block_keys = tile_of(width, query.element_size())
    block_rows = max(16, min(most, triton.next_power_of_2(total)))
    tiles = triton.cdiv(total, block_rows)
    parts = parts_of(key_heads * tiles, processors(query.device) * PER_PROCESSOR)
    out, sums = (
        torch.empty(parts, heads, rows, size, dtype=torch.float32, device=query.device)
        for size in (width, 1)
    )
    merged = torch.empty(1, rows, heads, width, dtype=query.dtype, device=query.device)
    _split_kernel[(key_heads, parts, tiles)](
        *(query, key, value, words, out, sums, scaling * LOG2_E, rows, total),
        *(query.stride(1), query.stride(2), key.stride(1), key.stride(2)),
        *(value.stride(1), value.stride(2), words.stride(0)),
        block_rows=block_rows,
        block_keys=block_keys,
        width=width,
        num_stages=STAGES,
    )
    block_parts = triton.next_power_of_2(parts)
    whole = heads * rows
    each = each_of(whole, MERGED // (block_parts * width), query.device)
    _merge_kernel[(triton.cdiv(whole, each),)](
        *(out, sums, merged, whole, rows, parts),
        block_rows=each,
        block_parts=block_parts,
        width=width,
    )
    return merged


def parts_of(programs_each: int, wanted: int) -> int:
    """Parts of the keys, for about `wanted` programs where each part takes `programs_each`; how
    long the text is does not count, for a recorded step serves all lengths."""
    return 1 + min(MOST_PARTS - 1, max(1, wanted // programs_each))
