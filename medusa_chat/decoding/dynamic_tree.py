"""Dynamic trees: a tree for one step, of the nodes that are most probable in it. No torch.

Heads are independent of each other, so a node's probability is the product along its path, and no
node is more probable than its parent. So the m most probable nodes are a tree, and the best one of
m nodes (the top products of arXiv 2401.10774, section 2.3.3, with this step's probabilities instead
of accuracies over many texts). Their number follows from the measured time of a step of m nodes.
"""

from collections.abc import Sequence
from functools import lru_cache

from medusa_chat.decoding.draft_budget import Allowance
from medusa_chat.decoding.tree import Tree


def grow(tree: Tree, shares: Sequence[float], allowance: Allowance) -> tuple[int, ...]:
    """The nodes of `tree` that are drafted, in rising order, the root first. shares[i]: the heads'
    probability of node i given its parent."""
    worth = [1.0]
    for node, parent in enumerate(tree.parents[1:], start=1):
        worth.append(worth[parent] * shares[node])
    return best_of(worth, allowance)


def best_of(worth: Sequence[float], allowance: Allowance) -> tuple[int, ...]:
    """Of nodes with these probabilities, none above its parent's, those that are worth their time,
    in rising order, the root first; without prices as many as are allowed."""
    order = sorted(range(1, len(worth)), key=lambda node: -worth[node])[: allowance.nodes - 1]
    if not allowance.seconds:
        return (0, *sorted(order))
    count, total, most = 0, 1.0, 1.0 - allowance.rate * allowance.seconds[0]
    for number, node in enumerate(order, start=1):
        total += worth[node]
        value = total - allowance.rate * allowance.seconds[number]
        if value > most:
            most, count = value, number
    return (0, *sorted(order[:count]))


@lru_cache(maxsize=256)
def subtree(tree: Tree, nodes: tuple[int, ...]) -> Tree:
    """The tree of these nodes of `tree`, which must contain every node's parent."""
    places = {node: place for place, node in enumerate(nodes)}
    parents = (-1, *(places[tree.parents[node]] for node in nodes[1:]))
    return Tree(parents, tuple(tree.ranks[node] for node in nodes))
