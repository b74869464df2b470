"""Passes: calls of the C decoder, and the memory that they work in."""

from ctypes import byref, pointer

import torch
from torch import Tensor

from medusa_chat.decoding.backends.native import structs
from medusa_chat.decoding.backends.native.library import NativeThreads


class Passes:
    """Passes through one decoder structure. job: what the next pass reads; the caller fills in how
    its rows see the text (kernels/pass.h). Tensors that it points at must outlive the pass."""

    def __init__(self, decoder: structs.Decoder, team: NativeThreads) -> None:
        self._decoder, self._team = decoder, team
        self.job = structs.Pass(pointer(decoder))
        self._work = torch.empty(0)

    def run(self, tokens: Tensor, places: Tensor, keys: int) -> Tensor | None:
        """tokens and places int64 [n] -> float32 [n, d] after the final norm; None where one of
        them is out of range. keys: the most tokens that a row sees."""
        rows, job = len(tokens), self.job
        job.threads = self._team.threads
        self._make_room(rows, keys, job.threads)
        hidden = torch.empty(rows, self._decoder.hidden)
        tokens, places = tokens.contiguous(), places.contiguous()
        job.tokens, job.positions = tokens.data_ptr(), places.data_ptr()
        job.rows, job.hidden = rows, hidden.data_ptr()
        return None if self._team.run(byref(job)) else hidden

    def _make_room(self, rows: int, keys: int, threads: int) -> None:
        """Allocate the work space of a pass of `rows` rows over `keys` tokens."""
        keys = -(-keys // 256) * 256
        needed = self._team.work_size(byref(self._decoder), rows, keys, threads)
        if len(self._work) < needed:
            self._work = torch.empty(needed)
            self.job.work = self._work.data_ptr()
