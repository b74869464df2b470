"""Products of a few rows with the blocks of a GGUF file, by blocks.cu."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.block_tiles import BLOCK, KINDS, STRIP, BlockKind, BlockTiles
from medusa_chat.decoding.backends.kernels import processors
from medusa_chat.decoding.backends.kernels.cuda_programs import (
    EIGHTS,
    architecture,
    function,
    launch,
    most_shared,
    program,
    table_of,
)

SOURCE = Path(__file__).with_name("blocks.cu")
RESIDENT = {1: 3, 2: 2}  # blocks a multiprocessor by EIGHTS, where they fit; else one
TABLES = 2**15  # bytes of shared memory of the pairs that a table gives
SPARE = 1024  # bytes that the device takes of each block's


def geometry(eights: int, kind: BlockKind, most: int) -> tuple[dict[str, int], int]:
    """What blocks.cu is compiled with for 8 `eights` rows, but for the number formats, and the
    bytes of shared memory that a launch asks for besides what the program has. most: bytes that a
    block may have."""
    tiles = 2 if eights > 2 and whole_shared(2, kind) <= most else 1
    fitting = max(1, most // whole_shared(tiles, kind))
    asked = {
        "BITS": kind.bits,
        "GROUP": kind.group,
        "CENTRE": kind.centre,
        "FORM": kind.scales,
        "HAS_TABLE": int(bool(kind.table)),
        "UNIT": kind.unit // BLOCK,
        "TILE": kind.tile,
        "EIGHTS": eights,
        "TILES": tiles,
        "RESIDENT": min(RESIDENT.get(eights, 1), fitting),
    }
    return asked, _ring(tiles, kind)


def whole_shared(tiles: int, kind: BlockKind) -> int:
    """Bytes of shared memory of a block."""
    others = 7 * 16 * tiles * 8 * 4
    return _ring(tiles, kind) + others + (TABLES if kind.table else 0) + SPARE


def _ring(tiles: int, kind: BlockKind) -> int:
    """Bytes of what the eight warps copy, twice, and of their scales."""
    span = BLOCK * (2 if kind.bits == 8 else 4)
    scales = span // kind.group * STRIP * (1 + kind.has_floor) * 4
    return 8 * tiles * (2 * span // kind.unit * kind.tile + scales)


def run(weight: BlockTiles, x: Tensor, out: Tensor) -> None:
    """Write x [m, K] contiguous, in fp16 or bf16, 1 to 64 rows, times a weight [N, K] to out
    [m, N], in that dtype or float32, rows of which may lie further apart.

    The same numbers give the same result at every call, whatever the number of rows."""
    rows, inputs = x.shape
    eights = next(count for count in EIGHTS if rows <= 8 * count)
    is_wide = out.dtype == torch.float32
    found, asked, shared = _function(x.device, x.dtype, eights, weight.type, is_wide)
    strips, kind = len(weight.data), weight.kind
    grid = min(-(-strips // asked["TILES"]), processors(x.device) * asked["RESIDENT"])
    table = table_of(kind.table, x.device, x.dtype) if kind.table else None
    tensors = weight.data, x, table, out
    units = weight.data.shape[1] // kind.tile
    launch(found, grid, shared, tensors, rows, inputs, weight.outs, units, out.stride(0))


@cache
def _function(
    device: torch.device, dtype: torch.dtype, eights: int, type: int, is_wide: bool
) -> tuple[Any, dict[str, int], int]:
    """The program for a device, what it is compiled with, and the shared memory that its launches
    ask for."""
    asked, shared = _asked(device, dtype, eights, type, is_wide)
    return function(SOURCE, asked, shared, device), asked, shared


def compiled(
    device: torch.device, dtype: torch.dtype, eights: int, type: int, is_wide: bool
) -> bytes:
    """The machine code of one program, which is kept where a folder for it is known."""
    asked, _ = _asked(device, dtype, eights, type, is_wide)
    return program(SOURCE, asked, architecture(device))


def _asked(
    device: torch.device, dtype: torch.dtype, eights: int, type: int, is_wide: bool
) -> tuple[dict[str, int], int]:
    asked, shared = geometry(eights, KINDS[type], most_shared(device))
    formats = {"IS_BF16": int(dtype == torch.bfloat16), "IS_WIDE": int(is_wide)}
    return asked | formats, shared
