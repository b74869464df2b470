"""The C library's functions, how many threads work together in them, and a decoder's passes."""

from ctypes import CDLL, POINTER, byref, c_int64, c_void_p, pointer
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.native import structs
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


class NativeThreads:
    """The C library's functions. count: the threads that share the work of a call (see
    cpu_threads.py)."""

    def __init__(self, library: CDLL, count: int) -> None:
        self.count = count
        self.run, self.linear = library.run, library.linear
        self._packs = {torch.float32: library.pack, torch.bfloat16: library.pack_half}
        self.work_size, self._panel = library.work_size, int(library.panel())
        self.head_states, self.best_guesses = library.head_states, library.best_guesses
        self.head_guesses = library.head_guesses
        sizes = [c_int64] * 2
        self.run.argtypes, self.run.restype = [POINTER(Pass)], c_int64
        self.linear.argtypes, self.linear.restype = [POINTER(Product), c_int64], None
        for pack in self._packs.values():
            pack.argtypes, pack.restype = [c_void_p, c_void_p, *sizes], None
        self.draw, self.row_sums = library.draw, library.row_sums
        for function, job in (
            *((self.head_states, HeadStates), (self.best_guesses, Guesses)),
            (self.head_guesses, HeadGuesses),
            *((self.draw, Draw), (self.row_sums, Sums)),
        ):
            function.argtypes, function.restype = [POINTER(job), c_int64], None
        self._pack_numbers = library.pack_numbers
        self._packed_size = library.packed_size
        kinds: list[Any] = [POINTER(Weights)]
        self._pack_numbers.argtypes = [*kinds, *[c_void_p] * 4, *sizes]
        self._packed_size.argtypes = kinds + sizes
        self._pack_numbers.restype, self._packed_size.restype = None, c_int64
        self.work_size.argtypes = [POINTER(Decoder), *sizes, c_int64]
        self.work_size.restype = c_int64

    def panels(self, weight: Tensor) -> Tensor:
        """[outs, ins] -> in fp32 [ceil(outs / P), ins, P], in bf16 [ceil(outs / P), ceil(ins / 2),
        P, 2]; 0 beyond the last output and input. P: the outputs of a panel."""
        outs, ins = weight.shape
        whole, width = weight.detach().contiguous(), self._panel
        shape = (ins, width) if whole.dtype == torch.float32 else (-(-ins // 2), width, 2)
        panels = torch.empty(-(-outs // width), *shape, dtype=whole.dtype)
        self._packs[whole.dtype](whole.data_ptr(), panels.data_ptr(), outs, ins)
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
        size = self._packed_size(byref(made_of), outs, ins)
        panels = torch.zeros(size, dtype=torch.uint8)
        made_of.panels = panels.data_ptr()
        tables = [
            numbers.data_ptr(),
            scales.data_ptr(),
            None if floors is None else floors.data_ptr(),
        ]
        self._pack_numbers(byref(made_of), *tables, panels.data_ptr(), outs, ins)
        return made_of, panels


class Passes:
    """Passes through one decoder structure. job: what the next pass reads; the caller fills in how
    its rows see the text (kernels/pass.h). Tensors that it points at must outlive the pass."""

    def __init__(self, decoder: structs.Decoder, threads: NativeThreads) -> None:
        self._decoder, self._threads = decoder, threads
        self.job = structs.Pass(pointer(decoder))
        self._work = torch.empty(0)

    def run(self, tokens: Tensor, places: int, keys: int) -> Tensor:
        """tokens int64 [n], and the address of as many places int64 -> float32 [n, d] after the
        final norm. keys: the most tokens that a row sees. Raises IndexError for a token or a place
        out of range."""
        rows, job = tokens.shape[0], self.job
        job.threads = self._threads.count
        self._make_room(rows, keys)
        hidden = torch.empty(rows, self._decoder.hidden)
        tokens = tokens.contiguous()
        job.tokens, job.positions = tokens.data_ptr(), places
        job.rows, job.hidden = rows, hidden.data_ptr()
        if self._threads.run(byref(job)):
            raise IndexError("a token id or its position is out of range")
        return hidden

    def _make_room(self, rows: int, keys: int) -> None:
        """Allocate the work space of a pass of `rows` rows over `keys` tokens."""
        keys = -(-keys // 256) * 256
        threads = self._threads
        needed = threads.work_size(byref(self._decoder), rows, keys, threads.count)
        if self._work.numel() < needed:
            self._work = torch.empty(needed)
            self.job.work = self._work.data_ptr()
