"""NativeHeads: the states and best guesses of Medusa heads, computed in C."""

from ctypes import byref
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native.blocks import Blocks
from medusa_chat.decoding.backends.native.library import WIDEST_PANEL, NativeThreads
from medusa_chat.decoding.backends.native.linear import NativeLinear
from medusa_chat.decoding.backends.native.structs import Guesses, HeadGuesses, HeadStates, Weights
from medusa_chat.decoding.heads import MedusaHeads


class NativeHeads(nn.Module):
    """The heads in C: the heads' residual layers at one position, and the best of logits.

    Heads of bf16 become whole numbers of 8 bits, 32 of them with one scale: a draft reads half as
    much, and with exact acceptance no text depends on what is drafted."""

    def __init__(
        self, heads: MedusaHeads, threads: NativeThreads, table: Blocks | None = None
    ) -> None:
        """table: the backbone's LM head as it is stored, of which the shortlist's rows stay so."""
        super().__init__()
        self._threads = threads
        layers, count, self._size, _ = heads.weight.shape
        self._bias = heads.bias.detach().float().contiguous()
        self._job = HeadStates(bias=self._bias.data_ptr())
        self._job.layers, self._job.heads, self._job.size = layers, count, self._size
        self.panels: Tensor
        self.root_panels: Tensor
        self._job.weights, panels = self._laid_out(heads.weight.flatten(0, 1))
        self.register_buffer("panels", panels, persistent=False)
        if heads.root_weight is not None:
            self._job.roots, panels = self._laid_out(heads.root_weight)
            self.register_buffer("root_panels", panels, persistent=False)
        self._most = 0  # guesses of a head that `guesses` finds
        if heads.short is not None:
            chosen = heads.shortlist
            assert chosen is not None
            listed = None if table is None else table.rows(chosen)
            heads.short = NativeLinear(heads.short, threads, listed)
            self._names = chosen.contiguous()
            self._most = len(chosen)
        self._short: Any = heads.short

    def _laid_out(self, matrices: Tensor) -> tuple[Weights, Tensor]:
        """Matrices [n, d, d] in panels, one behind the other -> what C is told of them, and what
        holds them."""
        if (
            len(matrices)
            and matrices.dtype == torch.bfloat16
            and matrices.shape[2] % WIDEST_PANEL == 0
        ):
            packed = self._threads.packed(Blocks.of(matrices.flatten(0, 1)))
            assert packed is not None
            return packed
        return self._threads.panels(matrices)

    def hidden_states(self, hidden: Tensor, root: Tensor | None, heads: int) -> Tensor:
        """hidden [1, d], root [1, d] -> float32 [heads, 1, d]."""
        x, job = hidden.float().contiguous(), self._job
        e = x if root is None else root.float().contiguous()
        job.root = e.data_ptr()
        out = torch.empty(2 * heads, 1, self._size)
        job.hidden, job.states, job.used = x.data_ptr(), out.data_ptr(), heads
        self._threads.c.head_states(byref(job), self._threads.count)
        return out[:heads]

    def can_guess(self, count: int) -> bool:
        """Whether `guesses` finds so many of each head: with a shortlist as long."""
        return count <= self._most

    def guesses(
        self, hidden: Tensor, root: Tensor | None, heads: int, count: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """hidden and root [1, d] -> of each head the best logits float32 and their tokens
        int64 [heads, count], falling, and log(sum(exp)) of all of the shortlist float32 [heads]."""
        x = hidden.float().contiguous()
        e = x if root is None else root.float().contiguous()
        states, logits = torch.empty(2 * heads, self._size), torch.empty(heads, self._short.outs)
        values, tokens = torch.empty(heads, count), torch.empty(heads, count, dtype=torch.long)
        sums = torch.empty(heads)
        job = HeadGuesses(self._job, self._short.job_of(states, logits))
        job.states.hidden, job.states.root = x.data_ptr(), e.data_ptr()
        job.states.states, job.states.used = states.data_ptr(), heads
        addresses = (t.data_ptr() for t in (logits, values, sums, tokens))
        job.guesses = Guesses(*addresses, *logits.shape, count)
        job.names = self._names.data_ptr()
        self._threads.c.head_guesses(byref(job), self._threads.count)
        return values, tokens, sums
