"""PathHeads: drafts with heads that read the path before them, for Hydra and the MLP speculator.

Head i reads the backbone's last state and the drafted tokens up to its depth, so that the children
of a node depend on all nodes above it. A level of the tree is one pass of one head.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters.beam import Beam, all_levels
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.grown import Growth
from medusa_chat.decoding.drafters.kinds import Kind
from medusa_chat.decoding.drafters.own_layers import Names
from medusa_chat.decoding.drafters.recorded_draft import RecordedDraft
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
        # what the first head reads at the text's end [1, w], where recorded drafts look for it
        self._last: Tensor | None = None
        self._has_last = False
        names = Names(None, model.vocabulary, vocabulary, model.device)
        self._growth = Growth(names, model.deepest)
        self._root = torch.zeros(1, dtype=torch.long, device=model.device)
        self.recorded = RecordedDraft(model.device) if model.device.type == "cuda" else None

    @property
    def nbytes(self) -> int:
        """Bytes of its cache."""
        return self._cache.nbytes if self._cache is not None else 0

    def crop(self, length: int) -> None:
        """See Drafter. Until it is told of the next token it has no last state, and drafts
        nothing."""
        if length < self.length:
            self.length, self._has_last = length, False
            if self._cache is not None:
                self._cache.crop(length)

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        """See Drafter."""
        assert features.final is not None
        last = self.model.read(features.final, self._cache)[-1:]
        if self._last is None:
            self._last = torch.empty_like(last)
        self._last.copy_(last)
        self._has_last = True
        self.length += len(features.tokens)

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter."""
        if self._last is None or not self._has_last or depth < 1 or allowance.nodes < 2:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        self._root.fill_(root)
        growth, levels = self._growth, self._growth.levels(allowance)
        if self.recorded is None:
            beam = Beam.of_root(self._root, self._last)
            return growth.tree(depth, allowance, root, beam, self._level)
        words = self.recorded.run(levels, lambda: self._levels(levels))
        return growth.folded(depth, allowance, root, words)

    def _levels(self, levels: int) -> Tensor:
        """The words of a draft (`all_levels`), without waiting for the device."""
        beam = Beam.of_root(self._root, self._last)
        return all_levels(beam, levels, self._level, self._growth.names)

    def _level(self, beam: Beam, level: int) -> tuple[Tensor, Tensor]:
        """See beam.Read: what the next head reads is left for the children."""
        assert beam.states is not None
        states, logits = self.model.step(level, beam.states, beam.tokens)
        return logits.log_softmax(-1), states
