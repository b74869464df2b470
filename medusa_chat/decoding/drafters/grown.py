"""Growth: a tree that a drafter grows level by level, its most probable nodes first.

Each level reads the best nodes of the last one (EAGLE-2, arXiv 2406.16858), as long as they are
among the most probable of all, and another level can hold a node that is worth its time. Where
waiting for the device costs more than a level does, a fixed number of levels is read at once.
"""

from collections.abc import Sequence

import torch

from medusa_chat.decoding.budget import Allowance
from medusa_chat.decoding.drafters.beam import Beam, Children, Read, split
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.drafters.own_layers import WIDTH, Names
from medusa_chat.decoding.tree import Tree

SURE, MEMORY = 0.7, 1 / 32  # of a level's best node: at first, and the weight of one level


class Grown:
    """A draft while it grows. most: nodes after the root that may be kept. tokens, parents, ranks,
    shares: of the nodes, the root first; reached: of their whole paths; best: nodes after the root,
    the most probable first, at most `most`; last: nodes of the last level; places: of a node among
    the children of its level's beam."""

    def __init__(self, root: int, most: int) -> None:
        self.most = most
        self.tokens, self.parents, self.ranks = [root], [-1], [-1]
        self.shares, self.reached = [torch.nan], [1.0]
        self.best: list[int] = []
        self.last: list[int] = [0]
        self.places = [0]

    def add(
        self,
        parents: Sequence[int],
        tokens: Sequence[Sequence[float]],
        shares: Sequence[Sequence[float]],
    ) -> None:
        """Add the children of nodes that were read: for each its children's tokens and shares,
        falling. A parent of -1 is none: it has no children."""
        self.last = []
        for row, parent in enumerate(parents):
            for rank, (token, share) in enumerate(zip(tokens[row], shares[row], strict=True)):
                if parent < 0 or share <= 0:  # a token that the backbone lacks, a broken number
                    continue
                self.last.append(len(self.tokens))
                self.places.append(row * len(tokens[row]) + rank)
                self.tokens.append(int(token))
                self.parents.append(parent)
                self.ranks.append(rank)
                self.shares.append(share)
                self.reached.append(self.reached[parent] * share)
        order = sorted([*self.best, *self.last], key=lambda n: (-self.reached[n], n))
        self.best = order[: self.most]

    def frontier(self) -> list[int]:
        """The nodes of the last level that may be kept, best first, at most WIDTH."""
        new = set(self.last)
        return [node for node in self.best if node in new][:WIDTH]

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


class Growth:
    """Grows the drafts of one drafter. names: of its tokens; deepest: levels of a draft; is_paid:
    whether a level takes a pass of the drafter, which must then be worth its time."""

    def __init__(self, names: Names, deepest: int, is_paid: bool = True) -> None:
        self.names, self.deepest, self._is_paid = names, deepest, is_paid
        self._sure = SURE  # how probable a level's best node was lately, given its parent

    def tree(
        self,
        depth: int,
        allowance: Allowance,
        root: int,
        beam: Beam,
        read: Read,
        first: float = 1.0,
    ) -> Candidates:
        """The candidates after the root, whose beam is the first one. The host decides after each
        level. first: passes that the first level takes."""
        grown, passes = Grown(root, allowance.nodes - 1), first
        children = Children.of(beam, 0, read, self.names)
        grown.add([0], *children.words.tolist())
        for level in range(1, min(depth, self.deepest)):
            frontier = grown.frontier()
            if not frontier or not self._pays(grown, frontier[0], allowance):
                break
            passes += self._is_paid
            places = [grown.places[node] for node in frontier]
            beam = children.chosen(torch.tensor(places, device=beam.tokens.device))
            children = Children.of(beam, level, read, self.names)
            tokens, shares = children.words.tolist()
            self._sure += MEMORY * (shares[0][0] - self._sure)
            grown.add(frontier, tokens, shares)
        return grown.candidates(passes)

    def levels(self, allowance: Allowance) -> int:
        """How many are read at once: a node below so many others is one of the draft's last."""
        return min(self.deepest, allowance.nodes - 1)

    def folded(
        self,
        depth: int,
        allowance: Allowance,
        root: int,
        words: list[float],
        first: float = 1.0,
    ) -> Candidates:
        """The candidates among levels that were read at once: `beam.all_levels`."""
        grown, frontier, levels = Grown(root, allowance.nodes - 1), [0], self.levels(allowance)
        for rows, places in split(words, levels, self.names.width)[:depth]:
            half = len(rows) // 2
            grown.add(frontier, rows[:half], rows[half:])
            found = {grown.places[node]: node for node in grown.last}
            frontier = [found.get(place, -1) for place in places]
            if not grown.frontier():
                break
        return grown.candidates(first + self._is_paid * (levels - 1))

    def _pays(self, grown: Grown, node: int, allowance: Allowance) -> bool:
        """Whether the children of a level's best node are worth another pass."""
        if not self._is_paid:
            return True
        best = grown.reached[node]
        nodes = sum(grown.reached[one] >= best for one in grown.best)
        return allowance.pays(best * self._sure, nodes)
