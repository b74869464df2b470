"""The Triton kernel of products with NF4 weights; imported only where it is about to run."""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from medusa_chat.decoding.backends.kernels import processors
from medusa_chat.decoding.backends.nf4_tiles import (
    BLOCK,
    BUCKETS,
    LEAST_ROWS,
    OUTPUTS,
    TABLE,
    Tiles,
    decoder,
)

PER_PROCESSOR = 8  # programs for each multiprocessor of the device, by splitting the inputs
MOST_PARTS = 16
MOST_BLOCKS = 8192  # of outputs


@triton.jit
def _nf4_kernel(
    codes,
    scales,
    x,
    table,
    out,
    summed,
    done,
    rows,
    outputs,
    inputs,
    tiles,
    steps: tl.constexpr,
    decoder: tl.constexpr,
    block: tl.constexpr,
    tile: tl.constexpr,
    block_outputs: tl.constexpr,
    block_rows: tl.constexpr,
    stages: tl.constexpr,
):
    """One part of the inputs for one block of outputs: W x^T, the weights on the side of the
    product that has 64 rows at least, so that few tokens leave nothing of it unused. Decoded
    weights go to it from registers (seen in the compiled code for sm_80 and sm_90). The program
    that is the last to end of those of a block sums its parts, in their order."""
    first = tl.program_id(0) * block_outputs
    part = tl.program_id(1)
    n = first + tl.arange(0, block_outputs)
    j = tl.arange(0, block)
    m = tl.arange(0, block_rows)
    row = (n // tile) * tiles  # the first tile of each output
    is_output = row < tl.cdiv(outputs, tile) * tiles
    acc = tl.zeros([block_outputs, block_rows], tl.float32)
    for i in tl.range(0, steps, num_stages=stages):
        step = part * steps + i
        at = row + step
        is_there = is_output & (step < tiles)  # the last part may have fewer
        where = codes + (at * tile + n % tile)[:, None] * block + j[None, :]
        byte = tl.load(where, is_there[:, None], 0)
        if decoder is None:
            low = tl.load(table + (byte & 15))
            high = tl.load(table + (byte >> 4))
        else:
            low, high = tl.inline_asm_elementwise(
                decoder,
                "=r,=r,=r,=r,r",
                [byte],
                dtype=(x.dtype.element_ty, x.dtype.element_ty),
                is_pure=True,
                pack=4,
            )
        k = step * 2 * block + j
        here = x + m[None, :] * inputs + k[:, None]
        x_low = tl.load(here, (m[None, :] < rows) & (k[:, None] < inputs), 0.0)
        here += block
        x_high = tl.load(here, (m[None, :] < rows) & (k[:, None] + block < inputs), 0.0)
        scale = scales + at * 2 * tile + n % tile
        s_low = tl.load(scale, is_there, 0.0)
        s_high = tl.load(scale + tile, is_there, 0.0)
        # a scale for each product of one block, so that no weight is ever multiplied by one
        acc += tl.dot(low, x_low, input_precision="ieee") * s_low[:, None]
        acc += tl.dot(high, x_high, input_precision="ieee") * s_high[:, None]
    inside = (m[None, :] < rows) & (n[:, None] < outputs)
    there = m[None, :] * outputs + n[:, None]
    parts = tl.num_programs(1)
    if parts == 1:
        tl.store(summed + there, acc, inside)
    else:
        tl.store(out + part * rows * outputs + there, acc, inside)
        tl.debug_barrier()  # all of this program is written before it says so
        mine = done + tl.program_id(0)
        if tl.atomic_add(mine, 1) == parts - 1:
            tl.store(mine, 0)  # for the next launch
            whole = tl.zeros([block_outputs, block_rows], tl.float32)
            for number in range(0, parts):
                here = out + number * rows * outputs + there
                # other programs wrote them just now: not from this multiprocessor's own cache
                whole += tl.load(here, inside, 0.0, cache_modifier=".cg")
            tl.store(summed + there, whole, inside)


def run(
    tiles: Tiles,
    x: Tensor,
    use_prmt: bool | None = None,
    programs: int | None = None,
    stages: int = 4,
) -> Tensor:
    """`product` by the kernel: x [m, K] contiguous, fp32 or 16 bits, 1 to 64 rows -> [m, N] in that
    dtype. use_prmt: decode by `decoder` instead of reading a table; None: where that is possible.

    The same numbers give the same result at every call. How the inputs are split does not depend on
    the number of rows.
    """
    rows, inputs = x.shape
    assert x.is_contiguous() and inputs == tiles.inputs and rows <= BUCKETS[-1]
    if use_prmt is None:
        use_prmt = x.is_cuda and not torch.version.hip and x.dtype.itemsize == 2
    block_rows = next(size for size in BUCKETS if max(rows, LEAST_ROWS) <= size)
    block_outputs = OUTPUTS if block_rows == LEAST_ROWS else 2 * OUTPUTS
    count, steps, parts = _split(tiles, programs or processors(x.device) * PER_PROCESSOR)
    blocks = triton.cdiv(tiles.outputs, block_outputs)
    assert blocks <= MOST_BLOCKS
    out = torch.empty(parts, rows, tiles.outputs, dtype=torch.float32, device=x.device)
    summed = torch.empty(rows, tiles.outputs, dtype=x.dtype, device=x.device)
    _nf4_kernel[(blocks, parts)](
        *(tiles.codes, tiles.scales, x, _table(x.device, x.dtype)),
        *(out, summed, _counts(x.device)),
        *(rows, tiles.outputs, inputs, count),
        steps=steps,
        decoder=_decoder(x.dtype) if use_prmt else None,
        block=BLOCK,
        tile=OUTPUTS,
        block_outputs=block_outputs,
        block_rows=block_rows,
        num_warps=block_outputs // 16,  # 64 outputs, a product's least, for each four of them
        stages=stages,
    )
    return summed


def _split(tiles: Tiles, programs: int) -> tuple[int, int, int]:
    """Tiles along the inputs, how many of them one program takes, and the number of parts."""
    beside, count = tiles.codes.shape[:2]
    wanted = min(MOST_PARTS, count, -(-programs // beside))
    steps = -(-count // wanted)
    return count, steps, -(-count // steps)


@cache
def _counts(device: torch.device) -> Tensor:
    """How many parts of each block have ended: zeros between launches, which are one after another
    on a device."""
    return torch.zeros(MOST_BLOCKS, dtype=torch.int32, device=device)


@cache
def _decoder(dtype: torch.dtype) -> str:
    return decoder(dtype)


@cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(TABLE, dtype=dtype, device=device)
