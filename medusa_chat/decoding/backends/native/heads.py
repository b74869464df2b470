"""NativeHeads: the states and best guesses of Medusa heads, computed in C."""

from ctypes import byref

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.linear import NativeLinear
from medusa_chat.decoding.backends.native.structs import Guesses, HeadStates
from medusa_chat.decoding.heads import MedusaHeads


class NativeHeads(nn.Module):
    """The heads in C: the heads' residual layers at one position, and the best of logits."""

    def __init__(self, heads: MedusaHeads, threads: NativeThreads) -> None:
        super().__init__()
        self._threads = threads
        layers, count, self._size, _ = heads.weight.shape
        panels = [threads.panels(w) for layer in heads.weight for w in layer]
        whole = torch.stack(panels) if panels else torch.empty(0, dtype=heads.weight.dtype)
        self.panels: Tensor
        self.register_buffer("panels", whole, persistent=False)
        self._bias = heads.bias.detach().float().contiguous()
        roots = () if heads.root_weight is None else heads.root_weight
        packed = [threads.panels(w) for w in roots]
        self.root_panels: Tensor
        self.register_buffer("root_panels", torch.stack(packed) if packed else None, False)
        self._job = HeadStates(whole.data_ptr(), self._bias.data_ptr())
        if packed:
            self._job.root_panels = self.root_panels.data_ptr()
        self._job.is_half = whole.dtype == torch.bfloat16
        self._job.layers, self._job.heads, self._job.size = layers, count, self._size
        if heads.short is not None:
            heads.short = NativeLinear(heads.short, threads)

    def hidden_states(self, hidden: Tensor, root: Tensor | None, heads: int) -> Tensor:
        """hidden [1, d], root [1, d] -> float32 [heads, 1, d]."""
        x, job = hidden.float().contiguous(), self._job
        e = x if root is None else root.float().contiguous()
        job.root = e.data_ptr()
        out = torch.empty(2 * heads, 1, self._size)
        job.hidden, job.states, job.used = x.data_ptr(), out.data_ptr(), heads
        self._threads.head_states(byref(job), self._threads.count)
        return out[:heads]

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[K, V] -> values float32 and tokens int64 [K, count], and log(sum(exp)) float32 [K]."""
        x = logits.float().contiguous()
        values, places = torch.empty(len(x), count), torch.empty(len(x), count, dtype=torch.long)
        sums = torch.empty(len(x))
        addresses = (t.data_ptr() for t in (x, values, sums, places))
        self._threads.best_guesses(byref(Guesses(*addresses, *x.shape, count)), self._threads.count)
        return values, places, sums
