"""Products of a few rows with quantised weights, by products.cu."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.kernels import processors
from medusa_chat.decoding.backends.kernels.cuda_programs import (
    EIGHTS,
    function,
    launch,
    most_shared,
    table_of,
)

# the 16 values of a 4-bit NormalFloat (QLoRA, arXiv 2305.14314, appendix E)
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SOURCE = Path(__file__).with_name("products.cu")
RESIDENT = {1: 3, 2: 2}  # blocks a multiprocessor by these, where they fit; else one
TABLES = 2**15  # bytes of shared memory of the pairs of 4 bits


def geometry(eights: int, bits: int, most: int) -> tuple[dict[str, int], int]:
    """What products.cu is compiled with for 8 `eights` rows, and the bytes of shared memory that a
    launch asks for besides what the program has. most: bytes that a block may have."""
    tiles = 2 if eights > 2 and _shared(2, bits)[0] <= most else 1
    asked = {"BITS": bits, "EIGHTS": eights, "TILES": tiles, "RESIDENT": RESIDENT.get(eights, 1)}
    return asked, _shared(tiles, bits)[1]


def _shared(tiles: int, bits: int) -> tuple[int, int]:
    """Bytes of shared memory of a block: all, and those of the chunks that its eight warps copy."""
    ring = 8 * 2 * 16 * tiles * (128 + (16 if bits == 4 else 0))
    return ring + 7 * 16 * tiles * 8 * 4 + (TABLES if bits == 4 else 0) + 1024, ring


def run(codes: Tensor, scales: Tensor, x: Tensor, bits: int) -> Tensor:
    """x [m, K] contiguous, in fp16 or bf16, 1 to 64 rows, times the weights [N, K] -> [m, N] in
    that dtype. bits: 4 for NF4, codes uint8 [N * K / 2], the first of a pair in the high half, and
    scales fp32 [N * K / 64]; 8 for codes int8 [N, K], and scales fp32 [N], of which a 127th counts.

    The same numbers give the same result at every call, whatever the number of rows."""
    rows, inputs = x.shape
    outputs = codes.numel() * 8 // (bits * inputs)
    eights = next(count for count in EIGHTS if rows <= 8 * count)
    found, tiles, shared = _function(x.device, x.dtype, eights, bits)
    blocks = processors(x.device) * RESIDENT.get(eights, 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tensors = codes, scales, x, table_of(TABLE, x.device, x.dtype), out
    grid = min(-(-outputs // (16 * tiles)), blocks)
    launch(found, grid, shared, tensors, rows, outputs, inputs // 64)
    return out


@cache
def _function(
    device: torch.device, dtype: torch.dtype, eights: int, bits: int
) -> tuple[Any, int, int]:
    """The program for a device, its tiles, and the shared memory that its launches ask for."""
    asked, shared = geometry(eights, bits, most_shared(device))
    asked["IS_BF16"] = int(dtype == torch.bfloat16)
    return function(SOURCE, asked, shared, device), asked["TILES"], shared
