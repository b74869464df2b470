"""NativeHeads: the drafts of Medusa heads, as one call into C."""

from ctypes import Array, addressof, byref, c_int64
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.linear import NativeLinear
from medusa_chat.decoding.backends.native.structs import Proposal
from medusa_chat.decoding.drafters import Plan
from medusa_chat.decoding.heads import MedusaHeads


class NativeHeads(nn.Module):
    """The HeadsTwin in C: the heads' residual layers at one position, and the best of their
    logits."""

    def __init__(self, heads: MedusaHeads, lm_head: Any, team: NativeThreads) -> None:
        """lm_head: the backbone's, by now native (backbone.LogitHead)."""
        super().__init__()
        self._team = team
        layers, count, self._size, _ = heads.weight.shape
        panels = [team.panels(w) for layer in heads.weight for w in layer]
        whole = torch.stack(panels) if panels else torch.empty(0, dtype=heads.weight.dtype)
        self.panels: Tensor
        self.register_buffer("panels", whole, persistent=False)
        self._bias = heads.bias.detach().float().contiguous()
        self._job = Proposal(whole.data_ptr(), bias=self._bias.data_ptr())
        self._job.is_half = whole.dtype == torch.bfloat16
        self._job.layers, self._job.heads, self._job.hidden_size = layers, count, self._size
        self._lm = lm_head.linear if heads.is_shared and lm_head.is_plain else None
        if heads.short is not None:
            heads.short = NativeLinear(heads.short, team)
        self._short, self._names = heads.short, heads.shortlist
        self._listed = [] if heads.shortlist is None else heads.shortlist.tolist()
        self._room: dict[tuple[int, int], list[Tensor]] = {}
        self._places: dict[tuple[int, int], Array[c_int64]] = {}

    def _fresh(self) -> Proposal:
        """A job with the heads' fields filled in."""
        job = Proposal.from_buffer_copy(self._job)
        job.threads = self._team.threads
        return job

    def hidden_states(self, hidden: Tensor, heads: int) -> Tensor:
        """[1, d] -> float32 [heads, 1, d]."""
        x, job = hidden.float().contiguous(), self._fresh()
        out = torch.empty(2 * heads, 1, self._size)
        job.hidden, job.states, job.used = x.data_ptr(), out.data_ptr(), heads
        self._team.propose(byref(job))
        return out[:heads]

    def best(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """[K, V] -> values float32 and tokens int64 [K, count], and log(sum(exp)) float32 [K]."""
        logits, job = logits.float().contiguous(), self._fresh()
        job.used, job.size, job.width = *logits.shape, count
        values, sums = torch.empty(job.used, count), torch.empty(job.used)
        places = torch.empty(job.used, count, dtype=torch.long)
        job.logits, job.values = logits.data_ptr(), values.data_ptr()
        job.sums, job.places = sums.data_ptr(), places.data_ptr()
        self._team.propose(byref(job))
        return values, places, sums

    def draft(self, plan: Plan) -> Proposal | None:
        """The job that fills `plan`; the caller sets the addresses of the hidden state, the tokens
        and the shares, and the root. None where the heads have LM heads of their own."""
        if self._lm is None or plan.index is None:
            return None
        job, depth, width = self._fresh(), plan.tree.depth, plan.width
        is_short = self._names is not None and width <= len(self._names)
        lm: Any = self._short if is_short else self._lm
        size = lm.outs
        job.lm_panels, job.lm_bias = lm.panels.data_ptr(), lm.bias_at
        job.names = self._names.data_ptr() if is_short and self._names is not None else None
        room = self._room_for(depth, width, size)
        job.states, job.logits, job.values, job.sums = (t.data_ptr() for t in room)
        job.places = addressof(self._places[depth, width])
        job.index, job.used, job.size, job.width = plan.index.data_ptr(), depth, size, width
        job.nodes = len(plan.tree)
        return job

    def guesses(self, job: Proposal, asked: int) -> tuple[tuple[int, ...], ...]:
        """The guesses of the first `asked` heads in the last draft of this job, the most probable
        first; the other heads did not run."""
        width = job.width
        tokens = self._places[job.used, width][: asked * width]
        if job.names:
            tokens = [self._listed[place] for place in tokens]
        return tuple(tuple(tokens[at : at + width]) for at in range(0, asked * width, width))

    def _room_for(self, depth: int, width: int, size: int) -> list[Tensor]:
        """Work space of a draft [2 * depth, d], [depth, size], [depth, width] and [depth], kept."""
        if (depth, width) not in self._room:  # these two determine `size`
            shapes = ((2 * depth, self._size), (depth, size), (depth, width), (depth,))
            self._room[depth, width] = [torch.empty(shape) for shape in shapes]
            self._places[depth, width] = (c_int64 * (depth * width))()
        return self._room[depth, width]
