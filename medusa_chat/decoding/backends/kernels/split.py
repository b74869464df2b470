"""The Triton kernel of attention in parts; imported only where it is about to run."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

STAGES = 2  # of keys and values that are in shared memory at once
TILE_BYTES = 16_384  # of the keys of a tile
PER_PROCESSOR = 2  # programs for each multiprocessor of the device
MOST_PARTS = 32  # of the keys; the last one is the draft
MOST_TILES = 4096  # of the rows of all heads


def tile_of(width: int, itemsize: int) -> tuple[int, int]:
    """The most rows and the keys of one tile, for heads of `width` numbers of `itemsize` bytes, so
    that its shared memory is within the 101,376 bytes of the smallest cards (sm_86, 89, 120). Keys
    divide 64, so that one word of a node mask holds all nodes of a tile."""
    keys = min(64, TILE_BYTES // (width * itemsize))
    return min(keys, 64 if itemsize == 2 else 32), keys


@triton.jit
def _merged(out, sums, at, whole, parts, is_row, width: tl.constexpr):
    """The parts of the rows `at`, by their logs of sums; what saw nothing was not written. Other
    programs wrote them just now, so they are not read from this multiprocessor's own cache."""
    d = tl.arange(0, width)
    top = tl.full([at.shape[0]], -1e30, tl.float32)
    norm = tl.zeros([at.shape[0]], tl.float32)
    acc = tl.zeros([at.shape[0], width], tl.float32)
    for part in range(0, parts):
        here = at + part * whole
        log = tl.load(sums + here, is_row, -float("inf"), cache_modifier=".cg")
        has_seen = (log > -float("inf"))[:, None]
        place = out + here[:, None] * width + d[None, :]
        values = tl.load(place, has_seen, 0.0, cache_modifier=".cg")
        best = tl.maximum(top, log)
        share = tl.exp(log - best)
        fade = tl.exp(top - best)
        acc = acc * fade[:, None] + values * share[:, None]
        norm = norm * fade + share
        top = best
    return acc / tl.where(is_row, norm, 1.0)[:, None]


@triton.jit
def _split_kernel(
    query,
    key,
    value,
    words,
    out,
    sums,
    merged,
    done,
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
    """One part of the keys for one tile of rows of one key-value head. The last part is the draft's
    own nodes; the others share the text, whose length is read here. The program that is the last to
    end of those of a tile merges the tile's parts, in their order."""
    head = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    is_draft = part == tl.num_programs(1) - 1
    r = tl.program_id(2) * block_rows + tl.arange(0, block_rows)
    is_row = r < total
    node = r % rows
    at = head * total + r  # among the rows of all heads
    d = tl.arange(0, width)

    length = tl.load(words + 1)
    first = tl.maximum(tl.load(words), 0)  # the root's, the lowest
    blocks = tl.cdiv(tl.maximum(length - first, 0), block_keys)
    share = tl.cdiv(blocks, tl.num_programs(1) - 1) * block_keys
    begin = tl.where(is_draft, length, first + part * share)
    end = tl.where(is_draft, length + rows, tl.minimum(begin + share, length))
    low = tl.load(words + node * word_row, is_row, 0)
    low = tl.where(is_draft, length, low)  # the draft's words know the window

    q_at = query + (at // rows) * q_head + node * q_row
    q = tl.load(q_at[:, None] + d[None, :], is_row[:, None], 0.0)
    top = tl.full([block_rows], -1e30, tl.float32)
    norm = tl.zeros([block_rows], tl.float32)
    acc = tl.zeros([block_rows, width], tl.float32)
    for start in range(begin, end, block_keys):
        s = start + tl.arange(0, block_keys)
        inside = s < end
        k = tl.load(key + head * k_head + s[:, None] * k_row + d[None, :], inside[:, None], 0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        here = words + node * word_row + 2 + (start - length) // 64
        word = tl.load(here, is_row & is_draft, -1)  # all is seen of a text, but for the window
        bit = (word[:, None] >> ((s - length) & 63)[None, :]) & 1
        seen = (bit != 0) & (s[None, :] >= low[:, None]) & inside[None, :]
        scores = tl.where(seen, scores, -float("inf"))
        best = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - best[:, None])
        fade = tl.exp(top - best)
        v = tl.load(value + head * v_head + s[:, None] * v_row + d[None, :], inside[:, None], 0.0)
        acc = acc * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        norm = norm * fade + tl.sum(weights, 1)
        top = best
    parts = tl.num_programs(1)
    whole = tl.num_programs(0).to(tl.int64) * total  # rows of all heads, of one part
    has_seen = norm > 0
    norm = tl.where(has_seen, norm, 1.0)
    here = at + part * whole
    there = out + here[:, None] * width + d[None, :]
    tl.store(there, acc / norm[:, None], (is_row & has_seen)[:, None])
    tl.store(sums + here, tl.where(has_seen, top + tl.log(norm), -float("inf")), is_row)

    tl.debug_barrier()  # all of this program is written before it says so
    mine = done + head * tl.num_programs(2) + tl.program_id(2)
    if tl.atomic_add(mine, 1) == parts - 1:
        tl.store(mine, 0)  # for the next launch
        mixed = _merged(out, sums, at, whole, parts, is_row, width)
        row = node * (tl.num_programs(0) * (total // rows)) + at // rows  # [n, H]
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
    parts = parts_of(key_heads * tiles, programs(query.device))
    out, sums = (
        torch.empty(parts, heads, rows, size, dtype=torch.float32, device=query.device)
        for size in (width, 1)
    )
    merged = torch.empty(1, rows, heads, width, dtype=query.dtype, device=query.device)
    assert key_heads * tiles <= MOST_TILES
    _split_kernel[(key_heads, parts, tiles)](
        *(query, key, value, words, out, sums, merged, _counts(query.device)),
        *(scaling, rows, total),
        *(query.stride(1), query.stride(2), key.stride(1), key.stride(2)),
        *(value.stride(1), value.stride(2), words.stride(0)),
        block_rows=block_rows,
        block_keys=block_keys,
        width=width,
        num_stages=STAGES,
    )
    return merged


def parts_of(programs_each: int, wanted: int) -> int:
    """Parts of the keys, for about `wanted` programs where each part takes `programs_each`; how
    long the text is does not count, for a recorded step serves all lengths."""
    return 1 + min(MOST_PARTS - 1, max(1, wanted // programs_each))


@cache
def programs(device: torch.device) -> int:
    """How many programs fill the device."""
    if device.type != "cuda":
        return 32  # of Triton's interpreter
    return PER_PROCESSOR * int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _counts(device: torch.device) -> Tensor:
    """How many parts of each tile have ended: zeros between launches, which are one after another
    on a device."""
    return torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
