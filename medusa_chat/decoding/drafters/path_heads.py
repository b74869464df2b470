"""PathHeads: drafts with heads that read the path before them, for Hydra and the MLP speculator.

Head i reads the backbone's last state and the drafted tokens up to its depth, so that the children
of a node depend on all nodes above it. A level of the tree is one pass of one head.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.grown import WIDTH, Best, Grown, Growth
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.drafters.own_layers import Names
from medusa_chat.decoding.kv_cache import KVCache
from medusa_chat.decoding.tree import ROOT


class HeadModel(Protocol):
    """Heads of one kind. deepest: how many; vocabulary: tokens of each."""

    kind: Kind
    device: torch.device
    deepest: int
    vocabulary: int

    def cache(self, capacity: int) -> KVCache | None:
        """An empty cache of a layer before the heads; None without one."""

    def read(self, final: Tensor, cache: KVCache | None) -> Tensor:
        """The backbone's states [m, d] of the next tokens -> what the first head reads [m, w]."""

    def step(self, level: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the head of a level, from 0, makes of states [f, w] and the token after each, int64
        [f]: what the next head reads [f, w'], and logits float32 [f, V]."""


class PathHeads:
    """A Drafter that reads states. vocabulary: tokens of the backbone that may be drafted."""

    reads_states = True
    taps: Sequence[int] = ()

    def __init__(self, model: HeadModel, capacity: int, vocabulary: int) -> None:
        """capacity: tokens of the backbone's context."""
        self.model, self.kind, self.length = model, model.kind, 0
        self._cache = model.cache(capacity)
        self._last: Tensor | None = None  # what the first head reads at the text's end [1, w]
        self._growth = Growth(model.deepest)
        self._names = Names(None, model.vocabulary, vocabulary, model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its cache."""
        return self._cache.nbytes if self._cache is not None else 0

    def crop(self, length: int) -> None:
        """See Drafter. Until it is told of the next token it has no last state, and drafts
        nothing."""
        if length < self.length:
            self.length, self._last = length, None
            if self._cache is not None:
                self._cache.crop(length)

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        """See Drafter."""
        assert features.final is not None
        self._last = self.model.read(features.final, self._cache)[-1:]
        self.length += len(features.tokens)

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter."""
        if self._last is None:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        return self._growth.tree(root, depth, allowance, self._expand)

    def _expand(self, grown: Grown, frontier: Sequence[int], level: int) -> tuple[*Best, Tensor]:
        """See grown.Expand: what the next head reads is left for the children."""
        known = [grown.states[node] for node in frontier] if level else [self._last]
        states = torch.stack([state.view(-1) for state in known if state is not None])
        tokens = torch.tensor([grown.tokens[node] for node in frontier], device=states.device)
        states, logits = self.model.step(level, states, tokens)
        return *self._names.best(logits.log_softmax(-1), WIDTH), states
