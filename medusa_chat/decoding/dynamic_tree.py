"""DynamicTree: a tree for this one step, of what the heads are sure of now. No torch.

Heads are independent of each other, so a node's probability is the product along its path, and no
node has more than its parent: the most probable nodes are a tree, the best one of their number
(the top products of arXiv 2401.10774, section 2.3.3, with this step's probabilities instead of
accuracies over many texts). How many there are follows from what a step of so many takes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from medusa_chat.decoding.tree import Tree

ASKED_EVERY = 8  # steps: the last of them has the usual tree whatever the heads are sure of, where
# it is recorded: to be seen, and so that how often they are right can be counted


@dataclass(slots=True)
class DynamicTree:
    """What decides how much of a larger tree is drafted. seconds[m - 1]: of a step of m nodes, its
    draft included; most: nodes it may have at most; rate: tokens that a second is worth; gate:
    where the first head's best guess is less probable, the other heads are not asked and nothing
    is drafted (0: they always are)."""

    seconds: tuple[float, ...]
    most: int
    rate: float
    gate: float = 0.0


def grow(tree: Tree, shares: Sequence[float], growth: DynamicTree) -> tuple[int, ...]:
    """The nodes of `tree` that are drafted, the root first, rising. shares[i]: the heads'
    probability of node i after its parent.

    The Python twin of kernels/growth.c.
    """
    worth = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        worth.append(worth[parent] * shares[node])
    order = sorted(range(1, len(tree)), key=lambda node: -worth[node])[: growth.most - 1]
    count, total, most = 0, 1.0, 1.0 - growth.rate * growth.seconds[0]
    for number, node in enumerate(order, start=1):
        total += worth[node]
        value = total - growth.rate * growth.seconds[number]
        if value > most:
            most, count = value, number
    return (0, *sorted(order[:count]))


@lru_cache(maxsize=256)
def subtree(tree: Tree, nodes: tuple[int, ...]) -> Tree:
    """These nodes of `tree`, with the parent of every one among them."""
    places = {node: place for place, node in enumerate(nodes)}
    parents = (-1, *(places[tree.parents[node]] for node in nodes[1:]))
    return Tree(parents, tuple(tree.ranks[node] for node in nodes))
