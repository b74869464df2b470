"""The C library's functions, and how many threads work together in them."""

from ctypes import CDLL, POINTER, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.native.blocks import Blocks
from medusa_chat.decoding.backends.native.structs import (
    Decoder,
    Draw,
    Guesses,
    HeadGuesses,
    HeadStates,
    Pass,
    Product,
    Sums,
    Weights,
)

WIDEST_PANEL = 32  # outputs, on any CPU
FLOATS, HALVES, NIBBLES, BYTES = range(4)  # kernels/weights.h
BLOCKS = 16, 32, 64  # inputs with one scale that kernels/packed.c takes


PAIR = c_int64, c_int64
SIGNATURES: dict[str, tuple[Any, ...]] = {  # of a function its result's type, then its arguments'
    "run": (c_int64, POINTER(Pass)),
    "linear": (None, POINTER(Product), c_int64),
    "head_states": (None, POINTER(HeadStates), c_int64),
    "head_guesses": (None, POINTER(HeadGuesses), c_int64),
    "best_guesses": (None, POINTER(Guesses), c_int64),
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

    def panels(self, weight: Tensor) -> Tensor:
        """[outs, ins] -> in fp32 [ceil(outs / P), ins, P], in bf16 [ceil(outs / P), ceil(ins / 2),
        P, 2]; 0 beyond the last output and input. P: the outputs of a panel."""
        outs, ins = weight.shape
        whole, width = weight.detach().contiguous(), self._panel
        shape = (ins, width) if whole.dtype == torch.float32 else (-(-ins // 2), width, 2)
        panels = torch.empty(-(-outs // width), *shape, dtype=whole.dtype)
        pack = self.c.pack if whole.dtype == torch.float32 else self.c.pack_half
        pack(whole.data_ptr(), panels.data_ptr(), outs, ins)
        return panels

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
