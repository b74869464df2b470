"""Growth: a tree that a drafter grows level by level, its most probable nodes first.

Each level reads the best nodes of the last one (EAGLE-2, arXiv 2406.16858), as long as they are
among the most probable of all, and another level can hold a node that is worth its time.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.tree import ROOT, Tree

WIDTH = 8  # children of a node, and nodes of a level that are expanded
SURE, MEMORY = 0.7, 1 / 32  # of a level's best node: at first, and the weight of one level


class Grown:
    """A draft while it grows. most: nodes after the root that may be kept. tokens, parents, ranks,
    shares: of the nodes, the root first; reached: of their whole paths; best: nodes after the root,
    the most probable first, at most `most`; last: nodes of the last level; states: of a node what
    its parent's pass left for it, if the drafter needs it."""

    def __init__(self, root: int, most: int) -> None:
        self.most = most
        self.tokens, self.parents, self.ranks = [root], [-1], [-1]
        self.shares, self.reached = [torch.nan], [1.0]
        self.best: list[int] = []
        self.last: list[int] = [0]
        self.states: list[Tensor | None] = [None]

    def add(
        self,
        parents: Sequence[int],
        tokens: Sequence[Sequence[int]],
        shares: Sequence[Sequence[float]],
        states: Tensor | None = None,
    ) -> None:
        """Add the children of expanded nodes: for each its children's tokens and shares, falling;
        states [f, w]: a row for each parent."""
        self.last = []
        for row, parent in enumerate(parents):
            for rank, (token, share) in enumerate(zip(tokens[row], shares[row], strict=True)):
                if share <= 0:  # of tokens that the backbone does not have, and broken numbers
                    continue
                self.last.append(len(self.tokens))
                self.tokens.append(token)
                self.parents.append(parent)
                self.ranks.append(rank)
                self.shares.append(share)
                self.reached.append(self.reached[parent] * share)
                self.states.append(None if states is None else states[row])
        order = sorted([*self.best, *self.last], key=lambda n: (-self.reached[n], n))
        self.best = order[: self.most]

    def frontier(self) -> list[int]:
        """The nodes of the last level that may be kept, best first, at most WIDTH."""
        new = set(self.last)
        return [node for node in self.best if node in new][:WIDTH]

    def path(self, node: int) -> list[int]:
        """The nodes from the root's child to this one."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found[::-1]

    def candidates(self, passes: float) -> Candidates:
        """The root and the best nodes, in the order in which they were found."""
        kept = [0, *sorted(self.best)]
        places = {node: place for place, node in enumerate(kept)}
        parents = (-1, *(places[self.parents[node]] for node in kept[1:]))
        return Candidates(
            Tree(parents, tuple(self.ranks[node] for node in kept)),
            [self.tokens[node] for node in kept],
            [self.shares[node] for node in kept],
            passes,
        )


# of a level: the nodes to expand, from 0 for the root alone -> of each the best tokens and their
# probabilities, falling, and what its children's pass needs
Best = tuple[list[list[int]], list[list[float]]]
Expand = Callable[[Grown, Sequence[int], int], tuple[*Best, Tensor | None]]


class Growth:
    """Grows the drafts of one drafter. deepest: levels of a draft; is_paid: whether a level takes a
    pass of the drafter, which must then be worth its time."""

    def __init__(self, deepest: int, is_paid: bool = True) -> None:
        self._deepest, self._is_paid = deepest, is_paid
        self._sure = SURE  # how probable a level's best node was lately, given its parent

    def tree(
        self, root: int, depth: int, allowance: Allowance, expand: Expand, first: float = 1.0
    ) -> Candidates:
        """The candidates after the root. first: passes that the first level takes."""
        if depth < 1 or allowance.nodes < 2:
            return Candidates(ROOT, [root], [torch.nan], 0.0)
        grown, passes = Grown(root, allowance.nodes - 1), first
        grown.add([0], *expand(grown, [0], 0))
        for level in range(1, min(depth, self._deepest)):
            frontier = grown.frontier()
            if not frontier or not self._pays(grown, frontier[0], allowance):
                break
            tokens, shares, states = expand(grown, frontier, level)
            passes += self._is_paid
            if shares[0]:
                self._sure += MEMORY * (shares[0][0] - self._sure)
            grown.add(frontier, tokens, shares, states)
        return grown.candidates(passes)

    def _pays(self, grown: Grown, node: int, allowance: Allowance) -> bool:
        """Whether the children of a level's best node are worth another pass."""
        if not self._is_paid:
            return True
        best = grown.reached[node]
        nodes = sum(grown.reached[one] >= best for one in grown.best)
        return allowance.pays(best * self._sure, nodes)
