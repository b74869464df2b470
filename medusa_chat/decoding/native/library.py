"""The C library's functions, and how many threads work together in them."""

from ctypes import CDLL, POINTER, c_float, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from medusa_chat.decoding.native.jobs import Decoder, Pass, Proposal, Step, Verdict

LANES = 8


class Team:
    """The library, and how many threads work together in it (see threads.py)."""

    def __init__(self, library: CDLL, threads: int) -> None:
        self.threads = threads
        self.run, self.linear, self.pack = library.run, library.linear, library.pack
        self.work_size = library.work_size
        self.chance = library.chance
        self.chance.argtypes = [c_void_p, c_int, c_float, c_int64, c_float]
        self.chance.restype = c_float
        self.propose, self.judge, self.step = library.propose, library.judge, library.step
        sizes = [c_int64] * 2
        self.run.argtypes, self.run.restype = [POINTER(Pass)], c_int64
        self.linear.argtypes, self.linear.restype = [c_void_p] * 4 + [c_int64] * 4, None
        self.pack.argtypes, self.pack.restype = [c_void_p, c_void_p, *sizes], None
        for function, kind in ((self.propose, Proposal), (self.judge, Verdict)):
            function.argtypes, function.restype = [POINTER(kind)], None
        self.step.argtypes, self.step.restype = [POINTER(Step)], c_int64
        self.work_size.argtypes = [POINTER(Decoder), *sizes, c_int64]
        self.work_size.restype = c_int64

    def panels(self, weight: Tensor) -> Tensor:
        """[outs, ins] -> [ceil(outs / 8), ins, 8], 0 beyond the last output."""
        outs, ins = weight.shape
        whole = weight.detach().contiguous()
        panels = torch.empty(-(-outs // LANES), ins, LANES)
        self.pack(whole.data_ptr(), panels.data_ptr(), outs, ins)
        return panels
