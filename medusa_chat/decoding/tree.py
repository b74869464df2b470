"""Tree: the shape of a draft. Plain tuples, no torch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.errors import UsageError

Choice = tuple[int, ...]


@dataclass(frozen=True)
class Tree:
    """n nodes, the root first, parents before children, in order of value.

    parents[i] is the parent of node i, -1 for the root only. ranks[i] is its place (0 = most
    probable) among the predictions of the head at its depth; the root has none (-1). The first m
    nodes are a tree too (`head`), so a tree of any size is cut from a larger one: never re-sort.
    Medusa, arXiv 2401.10774, section 2.1.2. Raises UsageError on anything that is no such tree.
    """

    parents: tuple[int, ...]
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1 or self.ranks[:1] != (-1,):
            raise UsageError("a tree starts with its root: parent -1, rank -1")
        if len(self.parents) != len(self.ranks) or len(self.parents) > MAX_NODES:
            raise UsageError(f"a tree has 1 to {MAX_NODES} nodes, a parent and a rank each")
        if any(not 0 <= parent < node for node, parent in enumerate(self.parents) if node):
            raise UsageError("in a tree every parent must come before its children")
        if any(rank < 0 for rank in self.ranks[1:]):
            raise UsageError("a rank is 0 or more")
        if len(set(self.choices)) != len(self.parents):
            raise UsageError("two nodes of a tree have the same parent and rank")

    def __len__(self) -> int:
        return len(self.parents)

    def __hash__(self) -> int:
        return self._hash  # computed once: trees are keys of many caches

    @cached_property
    def _hash(self) -> int:
        return hash((self.parents, self.ranks))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; its position is the root's plus this."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def depth(self) -> int:
        """Depth of the deepest node, which is the number of heads that the tree needs."""
        return max(self.depths)

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each node the nodes from the root to it, itself included."""
        paths: list[tuple[int, ...]] = [(0,)]
        for node, parent in enumerate(self.parents[1:], start=1):
            paths.append((*paths[parent], node))
        return tuple(paths)

    @cached_property
    def ancestors(self) -> tuple[tuple[bool, ...], ...]:
        """The tree mask [n, n]: row i is true where node i sees node j (ancestor or itself)."""
        rows = range(len(self))
        return tuple(tuple(j in seen for j in rows) for seen in map(set, self.paths))

    @property
    def leaves(self) -> tuple[int, ...]:
        """Nodes without children."""
        inner = set(self.parents)
        return tuple(node for node in range(len(self)) if node not in inner)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """Each node as the reference writes it: the ranks from depth 1 to its own; () = root."""
        return tuple(tuple(self.ranks[node] for node in path[1:]) for path in self.paths)

    @cached_property
    def width(self) -> int:
        """How many predictions of a head the tree needs at most."""
        return max(self.ranks) + 1

    def head(self, nodes: int) -> Self:
        """The first `nodes` nodes, the root counted."""
        return type(self)(self.parents[:nodes], self.ranks[:nodes])

    def pruned(self, depth: int) -> Self:
        """The nodes no deeper than `depth`, in their order."""
        return type(self).from_choices(c for c in self.choices[1:] if len(c) <= depth)

    @classmethod
    def from_choices(cls, choices: Iterable[Sequence[int]]) -> Self:
        """From the reference's `medusa_choices` (root left out), kept in the order given."""
        index: dict[Choice, int] = {(): 0}
        parents, ranks = [-1], [-1]
        for choice in map(tuple, choices):
            if not choice or choice[:-1] not in index:
                raise UsageError(f"tree choice {list(choice)} comes before its parent")
            if any(isinstance(r, bool) or not isinstance(r, int) or r < 0 for r in choice):
                raise UsageError(f"tree choice {list(choice)}: ranks are whole numbers from 0")
            parents.append(index[choice[:-1]])
            ranks.append(choice[-1])
            index[choice] = len(parents) - 1
        return cls(tuple(parents), tuple(ranks))


ROOT = Tree((-1,), (-1,))
