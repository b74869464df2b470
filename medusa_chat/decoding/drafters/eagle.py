"""Eagle: the drafter of EAGLE-1, EAGLE-3 and 3.1, a tree grown level by level.

A row of it is a state of the backbone and the token after it. The rows of the text are kept in a
cache of its own; drafted nodes have their parent's output for a state, and are forgotten after the
draft.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.eagle_model import EagleModel
from medusa_chat.decoding.drafters.grown import WIDTH, Best, Grown, Growth
from medusa_chat.decoding.drafters.own_layers import Names
from medusa_chat.decoding.tree import ROOT

DEEPEST = 8  # levels of a draft
FEW = 256  # rows of the text that wait for the next draft: with more, they are read at once
ROW = 0.1  # of a pass: what a row costs in a pass of many


class Eagle:
    """A Drafter that reads states. vocabulary: tokens of the backbone that may be drafted."""

    kind, reads_states = kinds.EAGLE, True

    def __init__(self, model: EagleModel, capacity: int, vocabulary: int) -> None:
        """capacity: tokens of the backbone's context."""
        self.model, self._capacity = model, capacity
        self.taps = model.form.taps
        self._cache = model.cache(capacity + DEEPEST * WIDTH + 1)
        shape = capacity, model.width
        self._states = torch.zeros(shape, dtype=model.dtype, device=model.device)
        self._ids: list[int] = []  # the text; _states[i] is what the backbone had at token i
        self._root: int | None = None  # the token behind the text whose row is in the cache
        self._growth = Growth(DEEPEST)
        self._behind: list[int] = []  # drafted nodes whose keys lie behind the text's, in order
        self._names = Names(model.ids, model.vocabulary, vocabulary, model.device)

    @property
    def nbytes(self) -> int:
        """Bytes of its cache and of the states that it keeps."""
        return self._cache.nbytes + self._states.nbytes

    @property
    def length(self) -> int:
        """See Drafter."""
        return len(self._ids)

    def crop(self, length: int) -> None:
        """See Drafter."""
        if length < len(self._ids):
            del self._ids[length:]
            self._drop_root()

    def _drop_root(self) -> None:
        """Keep the rows of the text alone: each needs the token after it."""
        self._root = None
        self._cache.crop(min(self._cache.length, max(len(self._ids) - 1, 0)))

    @torch.inference_mode()
    def observe(self, features: Features) -> None:
        """See Drafter."""
        assert features.final is not None
        if features.tokens and features.tokens[0] != self._root:
            self._drop_root()
        start, count = len(self._ids), len(features.tokens)
        self._states[start : start + count] = self.model.fused(features.final, features.taps)
        self._ids += features.tokens
        self._root = None
        if len(self._ids) - self._cache.length > FEW:
            self._read(len(self._ids) - 1, self._ids)

    @torch.inference_mode()
    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter."""
        if not self._ids:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        if self._root != root:
            self._drop_root()
        pending = len(self._ids) - self._cache.length
        return self._growth.tree(root, depth, allowance, self._expand, 1 + ROW * pending)

    def _expand(self, grown: Grown, frontier: Sequence[int], level: int) -> tuple[*Best, Tensor]:
        """See grown.Expand: what is fed back is left for the children."""
        if level:
            states, scores = self._level(grown, frontier, level)
        else:
            root = grown.tokens[0]
            states, scores = self._read(len(self._ids), [*self._ids, root])
            self._root, self._behind = root, []
        return *self._names.best(scores, WIDTH), states

    def _read(self, length: int, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Read the rows up to `length` into the cache: the state at each place, and the token after
        it -> the last row's output [1, w] and log probabilities [1, V_d]."""
        start = self._cache.length
        if start == length:  # the last row again, for its output
            start = self._cache.length = length - 1
        out, scores = self._states[:0], self._states[:0]
        while start < length:
            end = min(start + FEW, length)
            device = self.model.device
            places = torch.arange(start, end, device=device)
            seen = places[:, None] >= torch.arange(end, device=device)
            mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=device)
            mask.masked_fill_(~seen, -torch.inf)
            given = torch.tensor(tokens[start + 1 : end + 1], device=device)
            out, scores = self.model(self._states[start:end], given, places, mask, self._cache)
            self._cache.extend(end - start)
            start = end
        return out[-1:], scores[-1:]

    def _level(self, grown: Grown, frontier: Sequence[int], level: int) -> tuple[Tensor, Tensor]:
        """Read nodes of one level -> their outputs [f, w] and log probabilities [f, V_d]. Their
        keys and values stay behind the text's until the draft is made."""
        device, text = self.model.device, self._cache.length
        before = len(self._behind)
        self._behind += frontier
        seen = [set(grown.path(node)) for node in frontier]
        rows = [[node in above for node in self._behind] for above in seen]
        shape = len(frontier), text + len(self._behind)
        mask = torch.zeros(shape, dtype=self.model.dtype, device=device)
        mask[:, text:].masked_fill_(~torch.tensor(rows, device=device), -torch.inf)
        tokens = torch.tensor([grown.tokens[node] for node in frontier], device=device)
        places = torch.full((len(frontier),), text - 1 + level, device=device)
        states = torch.stack([s for n in frontier if (s := grown.states[n]) is not None])
        self._cache.length = text + before
        out, scores = self.model(states, tokens, places, mask, self._cache)
        self._cache.length = text
        return out, scores
