"""The C library's functions, and how many threads work together in them."""

from collections.abc import Iterator
from ctypes import CDLL, POINTER, c_int64
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.backends.native.blocks import Blocks
from medusa_chat.decoding.backends.native.structs import (
    Decoder,
    Draw,
    HeadGuesses,
    HeadStates,
    Pass,
    Product,
    Sums,
    Weights,
)

WIDEST_PANEL = 32  # outputs, on any CPU
FLOATS, HALVES, UPPERS, NIBBLES, BYTES = range(5)  # kernels/weights.h
BLOCKS = 16, 32, 64  # inputs with one scale that kernels/packed.c takes
SOME = 4096  # rows of a weight that are looked at together
UNPACKED = 2**20  # weights that are unpacked together, a few MB of fp32

SIGNATURES: dict[str, tuple[Any, ...]] = {  # of a function its result's type, then its arguments'
    "run": (c_int64, POINTER(Pass)),
    "linear": (None, POINTER(Product), c_int64),
    "head_states": (None, POINTER(HeadStates), c_int64),
    "head_guesses": (None, POINTER(HeadGuesses), c_int64),
    "draw": (None, POINTER(Draw), c_int64),
    "row_sums": (None, POINTER(Sums), c_int64),
    "work_size": (c_int64, POINTER(Decoder), *[c_int64] * 3),
}


class NativeThreads:
    """The C library's functions (`c`). count: the threads that share the work of a call (see
    cpu_threads.py)."""

    def __init__(self, library: CDLL, count: int) -> None:
        self.count, self.c, self._panel = count, library, int(library.panel())
        for name, (result, *arguments) in SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result

    def panels(self, weight: Tensor) -> tuple[Weights, Tensor]:
        """Matrices [outs, ins] or [n, outs, ins] in panels of P outputs, one behind the other ->
        what C is told of them, and the panels in words of 4 bytes, int32: of fp32 [n ceil(outs /
        P), ins, P], of two of bf16, which fp32 weights stay in where that changes none of them,
        [n ceil(outs / P), ceil(ins / 2), P]; 0 beyond the last output and input."""
        kind = panel_kind(weight)
        rows = weight.detach().to(torch.float32 if kind == FLOATS else torch.bfloat16)
        spare = -rows.shape[-1] % (1 if kind == FLOATS else 2), -rows.shape[-2] % self._panel
        rows = F.pad(rows, (0, spare[0], 0, spare[1])) if any(spare) else rows.contiguous()
        words = rows.view(torch.int32).flatten(0, -2).unflatten(0, (-1, self._panel))
        panels = words.transpose(1, 2).contiguous()
        return Weights(panels=panels.data_ptr(), kind=kind), panels

    def packed(self, blocks: Blocks) -> tuple[Weights, Tensor] | None:
        """A stored weight [outs, ins] in panels of its own numbers -> what C is told of them, and
        their bytes, uint8 [size]; None for blocks that the kernels do not know."""
        if blocks.block not in BLOCKS:
            return None
        tables = [blocks.scales] if blocks.floors is None else [blocks.scales, blocks.floors]
        pairs = blocks.numbers.view(torch.int16).unflatten(1, (-1, blocks.block // 2))
        if blocks.is_small:  # two pairs in the bytes of one, then four in a word
            halves = (pairs[..., ::2] | pairs[..., 1::2] << 4).view(torch.uint8)
            pairs = halves.unflatten(-1, (-1, 2, 2)).transpose(-1, -2).flatten(-3).view(torch.int32)
        parts = []
        for part in (*(table.unsqueeze(2) for table in tables), pairs):
            whole = F.pad(part, (0, 0, 0, 0, 0, -len(part) % self._panel))
            whole = whole.unflatten(0, (-1, self._panel)).permute(0, 2, 3, 1).contiguous()
            parts.append(whole.flatten(2).view(torch.uint8))
        panels = torch.cat(parts, 2).flatten()
        made_of = Weights(panels=panels.data_ptr(), block=blocks.block)
        made_of.kind = NIBBLES if blocks.is_small else BYTES
        made_of.has_floor = blocks.floors is not None
        made_of.is_wide = blocks.scales.dtype == torch.float32
        return made_of, panels

    def weights(self, made_of: Weights, panels: Tensor, ins: int) -> Iterator[Tensor]:
        """What `panels` or `packed` laid out, some panels at a time: float32 [n, ins], the last
        ones followed by outputs of 0."""
        is_packed = made_of.kind in (NIBBLES, BYTES)
        count = len(panels)
        if is_packed:
            tables = (1 + bool(made_of.has_floor)) * (4 if made_of.is_wide else 2)
            numbers = made_of.block // 2 if made_of.kind == NIBBLES else made_of.block
            count = len(panels) // (ins // made_of.block * self._panel * (tables + numbers))
        for part in panels.view(count, -1).split(max(1, UNPACKED // (ins * self._panel))):
            yield self._stored(made_of, part, ins) if is_packed else _plain(made_of.kind, part, ins)

    def _stored(self, made_of: Weights, part: Tensor, ins: int) -> Tensor:
        """Panels uint8 [n, bytes] of a stored weight -> float32 [outs, ins]."""
        size, dtype = (4, torch.float32) if made_of.is_wide else (2, torch.float16)
        whole = part.view(len(part), ins // made_of.block, -1)  # of each block of P outputs
        kinds = [dtype] * (1 + bool(made_of.has_floor))
        ends = [size * self._panel] * len(kinds)
        *tables, pairs = whole.split([*ends, whole.shape[2] - sum(ends)], 2)

        def by_output(table: Tensor, kind: torch.dtype) -> Tensor:
            words = table.contiguous().view(kind).unflatten(2, (-1, self._panel))
            found: Tensor = words.permute(0, 3, 1, 2).flatten(0, 1).contiguous()
            return found  # [outs, blocks, words]

        if made_of.kind == NIBBLES:
            quads = by_output(pairs, torch.int32).view(torch.uint8).unflatten(-1, (-1, 2, 2))
            halves = quads.transpose(-1, -2).flatten(-3).view(torch.int16)
            numbers = torch.stack([halves & 0x0F0F, halves >> 4 & 0x0F0F], -1).flatten(-2)
        else:
            numbers = by_output(pairs, torch.int16)
        scale, *floor = (by_output(t, kind).float() for t, kind in zip(tables, kinds, strict=True))
        values = numbers.view(torch.int8).float().mul_(scale)
        return (values.add_(floor[0]) if floor else values).flatten(1)


def _plain(kind: int, part: Tensor, ins: int) -> Tensor:
    """Panels int32 [n, words] of a weight of fp32 or bf16 -> float32 [outs, ins]."""
    width = ins if kind == FLOATS else -(-ins // 2)
    words = part.view(len(part), width, -1).transpose(1, 2).flatten(0, 1).contiguous()
    numbers = words.view(torch.float32 if kind == FLOATS else torch.bfloat16)
    return numbers[:, :ins].float()


def panel_kind(weight: Tensor) -> int:
    """How a weight [..., ins] of fp32 or bf16 lies in panels without a change of its numbers."""
    if weight.dtype == torch.bfloat16:
        return HALVES
    parts = weight.detach().flatten(0, -2).split(SOME)
    is_short = weight.shape[-1] % 2 == 0 and all(p.bfloat16().float().equal(p) for p in parts)
    return UPPERS if is_short else FLOATS
