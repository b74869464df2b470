"""Pair: two draft models that draft together; their trees become one.

Merged trees are SpecInfer's (arXiv 2305.09781). A node that both propose is one node. After a place
that both have read, a token's probability is the mean of theirs, in which each counts by how right
it was lately: its share of what came is the posterior of a mixture of the two, a step of EM.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.drafter import Candidates, Drafter, Features
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import Tree

MEMORY, LEAST = 1 / 32, 0.05  # of one token in what a model counts, and the least of that
SOURCES: dict[tuple[bool, bool], Source] = {
    (True, False): "first draft",
    (False, True): "second draft",
    (True, True): "both drafts",
}


@dataclass
class Merged:
    """The nodes of two trees, the root first. shares: of each what either model gave it, None where
    that did not propose it; has_read: whether either model looked behind a node; places: the node
    of a token after a node."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    shares: list[list[float | None]] = field(default_factory=lambda: [[None, None]])
    has_read: list[list[bool]] = field(default_factory=lambda: [[False, False]])
    places: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, model: int, found: Candidates) -> None:
        """Add what a model (0 or 1) proposes after the root."""
        here = [0]
        for node in range(1, len(found.tree)):
            parent, token = here[found.tree.parents[node]], found.tokens[node]
            at = self.places.setdefault((parent, token), len(self.tokens))
            if at == len(self.tokens):
                self.tokens.append(token)
                self.parents.append(parent)
                self.shares.append([None, None])
                self.has_read.append([False, False])
            self.shares[at][model] = found.shares[node]
            self.has_read[parent][model] = True
            here.append(at)

    def candidates(self, weights: Sequence[float], passes: float) -> Candidates:
        """The nodes with the probabilities of both. weights: what either model counts."""
        shares, ranks = [float("nan")], [-1]
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents[1:], start=1):
            counts = [w * has for w, has in zip(weights, self.has_read[parent], strict=True)]
            given = zip(counts, self.shares[node], strict=True)
            shares.append(sum(w * (share or 0.0) for w, share in given) / sum(counts))
            children.setdefault(parent, []).append(node)
            ranks.append(0)
        for siblings in children.values():
            order = sorted(siblings, key=lambda node: -shares[node])
            for rank, node in enumerate(order):
                ranks[node] = rank
        proposed = [(one is not None, other is not None) for one, other in self.shares[1:]]
        return Candidates(
            Tree(tuple(self.parents), tuple(ranks)),
            self.tokens,
            shares,
            passes,
            (None, *(SOURCES[pair] for pair in proposed)),
        )


class Pair:
    """A Drafter of two draft models, which follow the same text."""

    kind, reads_states = kinds.DRAFT, False
    taps: Sequence[int] = ()

    def __init__(self, first: Drafter, second: Drafter, cost: float) -> None:
        """cost: of a pass of the second model, in passes of the first."""
        self.first, self.second, self._cost = first, second, cost
        self.weight = 0.5  # what the first model counts; the second counts the rest
        self._made: Merged | None = None  # the last draft
        self._followed: list[int] = []  # the text since then, from that draft's root on

    @property
    def length(self) -> int:
        """See Drafter."""
        return self.first.length

    def crop(self, length: int) -> None:
        """See Drafter."""
        if length < self.length:
            self._made = None
        self.first.crop(length)
        self.second.crop(length)

    def observe(self, features: Features) -> None:
        """See Drafter."""
        self._followed += features.tokens
        self.first.observe(features)
        self.second.observe(features)

    def draft(self, root: int, depth: int, allowance: Allowance) -> Candidates:
        """See Drafter. A pass is one of the first model's."""
        self._learn([*self._followed, root])
        other = replace(allowance, per_pass=allowance.per_pass * self._cost)
        found = (
            self.first.draft(root, depth, allowance),
            self.second.draft(root, depth, other),
        )
        made = Merged([root])
        for model, candidates in enumerate(found):
            made.add(model, candidates)
        self._made, self._followed = made, []
        passes = found[0].passes + self._cost * found[1].passes
        return made.candidates((self.weight, 1 - self.weight), passes)

    def _learn(self, text: Sequence[int]) -> None:
        """Learn what either model counts from what came after the last draft. text: its root, and
        the tokens behind it."""
        made, at = self._made, 0
        if made is None or text[0] != made.tokens[0]:
            return
        for token in text[1:]:
            node = made.places.get((at, token))
            if node is None:
                break
            if all(made.has_read[at]):
                one, other = (share or 0.0 for share in made.shares[node])
                ours, theirs = self.weight * one, (1 - self.weight) * other
                if ours + theirs > 0:
                    self.weight += MEMORY * (ours / (ours + theirs) - self.weight)
                    self.weight = min(max(self.weight, LEAST), 1 - LEAST)
            at = node
