"""The C library's functions, and how many threads work together in them."""

from ctypes import CDLL, POINTER, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

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

PAIR = c_int64, c_int64
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of a function its result's type, then its arguments'
    "run": (c_int64, POINTER(Pass)),
    "linear": (None, POINTER(Product), c_int64),
    "head_states": (None, POINTER(HeadStates), c_int64),
    "head_guesses": (None, POINTER(HeadGuesses), c_int64),
    "draw": (None, POINTER(Draw), c_int64),
    "row_sums": (None, POINTER(Sums), c_int64),
    "pack": (None, c_void_p, c_void_p, *PAIR),
    "pack_half": (None, c_void_p, c_void_p, *PAIR),
    "pack_numbers": (None, POINTER(Weights), *[c_void_p] * 4, *PAIR),
    "packed_size": (c_int64, POINTER(Weights), *PAIR),
    "work_size": (c_int64, POINTER(Decoder), *PAIR, c_int64),
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
        what C is told of them, and the panels: in fp32 [n ceil(outs / P), ins, P], in bf16, which
        fp32 weights stay in where that changes none of them, [n ceil(outs / P), ceil(ins / 2), P,
        2]; 0 beyond the last output and input."""
        whole, width, kind = weight.detach(), self._panel, panel_kind(weight)
        *count, outs, ins = weight.shape
        shape = (ins, width) if kind == FLOATS else (-(-ins // 2), width, 2)
        dtype = torch.float32 if kind == FLOATS else torch.bfloat16
        panels = torch.empty(*count, -(-outs // width), *shape, dtype=dtype)
        pack = self.c.pack if kind == FLOATS else self.c.pack_half
        for matrix, into in zip(whole, panels, strict=True) if count else [(whole, panels)]:
            rows = matrix.to(dtype).contiguous()
            pack(rows.data_ptr(), into.data_ptr(), outs, ins)
        return Weights(panels=panels.data_ptr(), kind=kind), panels.flatten(0, len(count))

    def packed(self, blocks: Blocks) -> tuple[Weights, Tensor] | None:
        """A stored weight [outs, ins] in panels of its own numbers -> what C is told of them, and
        their bytes, uint8 [size]; None for blocks that the kernels do not know."""
        outs, ins = blocks.numbers.shape
        if blocks.block not in BLOCKS:
            return None
        numbers, scales = blocks.numbers.contiguous(), blocks.scales.contiguous()
        floors = None if blocks.floors is None else blocks.floors.contiguous()
        made_of = Weights(kind=NIBBLES if blocks.is_small else BYTES, block=blocks.block)
        made_of.has_floor, made_of.is_wide = floors is not None, scales.dtype == torch.float32
        size = self.c.packed_size(byref(made_of), outs, ins)
        panels = torch.zeros(size, dtype=torch.uint8)
        made_of.panels = panels.data_ptr()
        tables = [
            numbers.data_ptr(),
            scales.data_ptr(),
            None if floors is None else floors.data_ptr(),
        ]
        self.c.pack_numbers(byref(made_of), *tables, panels.data_ptr(), outs, ins)
        return made_of, panels


def panel_kind(weight: Tensor) -> int:
    """How a weight [..., ins] of fp32 or bf16 lies in panels without a change of its numbers."""
    if weight.dtype == torch.bfloat16:
        return HALVES
    parts = weight.detach().flatten(0, -2).split(SOME)
    is_short = weight.shape[-1] % 2 == 0 and all(p.bfloat16().float().equal(p) for p in parts)
    return UPPERS if is_short else FLOATS
