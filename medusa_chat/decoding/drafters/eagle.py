"""Eagle: the drafter of EAGLE-1, EAGLE-3 and 3.1, a tree grown level by level.

A row of it is a state of the backbone and the token after it. The rows of the text are kept in a
cache of its own; drafted nodes have their parent's output for a state, and are forgotten after the
draft. The tree is EAGLE-2's (arXiv 2406.16858): each pass reads the best nodes of the last level,
as long as another level can hold a node that is worth its time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Features
from medusa_chat.decoding.drafters.eagle_model import EagleModel
from medusa_chat.decoding.tree import ROOT, Tree

WIDTH = 8  # children of a node, and nodes of a level that a pass reads
DEEPEST = 8  # levels of a draft
FEW = 256  # rows of the text that wait for the next draft: with more, they are read at once
ROW = 0.1  # of a pass: what a row costs in a pass of many
SURE, MEMORY = 0.7, 1 / 32  # of a level's best node: at first, and the weight of one level


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
        self._sure = SURE  # how probable a level's best node was lately, given its parent
        own = model.vocabulary
        ids = torch.arange(own, device=model.device) if model.ids is None else model.ids
        # the draft's tokens that the backbone has
        self._names, self._fits = ids, ids < vocabulary
        self._is_whole = bool(self._fits.all())

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
        states, scores = self._read(len(self._ids), [*self._ids, root])
        self._root = root
        grown = _Grown(root)
        passes = 1 + ROW * pending
        grown.add([0], *self._best(scores), states)
        for level in range(1, min(depth, DEEPEST)):
            frontier = grown.frontier(allowance.nodes - 1)
            if not frontier:
                break
            best = grown.reached[frontier[0]]
            nodes = sum(reached >= best for reached in grown.reached)
            if not allowance.pays(best * self._sure, nodes):
                break
            states, scores = self._level(grown, frontier, level)
            passes += 1
            tokens, shares = self._best(scores)
            self._sure += MEMORY * (shares[0][0] - self._sure)
            grown.add(frontier, tokens, shares, states)
        return grown.candidates(allowance.nodes - 1, passes)

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

    def _level(self, grown: "_Grown", frontier: Sequence[int], level: int) -> tuple[Tensor, Tensor]:
        """Read nodes of one level -> their outputs [f, w] and log probabilities [f, V_d]. Their
        keys and values stay behind the text's until the draft is made."""
        device, text = self.model.device, self._cache.length
        before = len(grown.read)
        grown.read += frontier
        seen = [grown.ancestors(node) for node in frontier]
        rows = [[node in above for node in grown.read] for above in seen]
        mask = torch.zeros(len(frontier), text + len(grown.read), dtype=self.model.dtype)
        mask[:, text:].masked_fill_(~torch.tensor(rows), -torch.inf)
        tokens = torch.tensor([grown.tokens[node] for node in frontier], device=device)
        places = torch.full((len(frontier),), text - 1 + level, device=device)
        states = torch.stack([grown.states[node - 1] for node in frontier])
        self._cache.length = text + before
        out, scores = self.model(states, tokens, places, mask.to(device), self._cache)
        self._cache.length = text
        return out, scores

    def _best(self, scores: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """log probabilities [f, V_d] -> of each row the best tokens, in the backbone's ids, and
        their probabilities."""
        if not self._is_whole:
            scores = scores.masked_fill(~self._fits, -torch.inf)
        values, best = scores.topk(min(WIDTH, scores.shape[1]))
        return self._names[best].tolist(), values.exp().nan_to_num(0.0).tolist()


class _Grown:
    """A draft while it grows. tokens, parents, ranks, shares: of the nodes, the root first;
    reached: of their whole paths; states: of each after the root its parent's output; read: nodes
    whose keys are in the cache, in order; unread: nodes of the last level."""

    def __init__(self, root: int) -> None:
        self.tokens, self.parents, self.ranks = [root], [-1], [-1]
        self.shares, self.reached = [torch.nan], [1.0]
        self.states: list[Tensor] = []
        self.read: list[int] = []
        self.unread: list[int] = []

    def add(
        self,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
        states: Tensor,
    ) -> None:
        """Add the children of nodes that were read, whose outputs are states [f, w]."""
        self.unread = []
        for row, parent in enumerate(parents):
            for rank, (token, share) in enumerate(zip(tokens[row], shares[row], strict=True)):
                if share <= 0:  # of tokens that the backbone does not have, and broken numbers
                    continue
                self.unread.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(parent)
                self.ranks.append(rank)
                self.shares.append(share)
                self.reached.append(self.reached[parent] * share)
                self.states.append(states[row])

    def frontier(self, most: int) -> list[int]:
        """The nodes of the last level that are among the `most` most probable of all, best first,
        at most WIDTH."""
        order = sorted(range(1, len(self.tokens)), key=lambda n: -self.reached[n])
        kept = set(order[:most])
        chosen = sorted(kept.intersection(self.unread), key=lambda n: -self.reached[n])
        return chosen[:WIDTH]

    def ancestors(self, node: int) -> set[int]:
        """The node and those above it, without the root."""
        found = set()
        while node > 0:
            found.add(node)
            node = self.parents[node]
        return found

    def candidates(self, most: int, passes: float) -> Candidates:
        """The root and the `most` most probable nodes, in the order in which they were found."""
        order = sorted(range(1, len(self.tokens)), key=lambda n: (-self.reached[n], n))
        kept = [0, *sorted(order[:most])]
        places = {node: place for place, node in enumerate(kept)}
        parents = (-1, *(places[self.parents[node]] for node in kept[1:]))
        return Candidates(
            Tree(parents, tuple(self.ranks[node] for node in kept)),
            [self.tokens[node] for node in kept],
            [self.shares[node] for node in kept],
            passes,
        )
