"""The best tree for a table of rank accuracies. Plain numbers, no torch."""

from math import isfinite

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.expected_length import Accuracies, likeliest


def search_tree(accuracies: Accuracies, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root counted, with the longest expected path.

    accuracies[k][i]: how often the (i+1)-th prediction of head k alone is right. The value of a
    node is the product of the accuracies along its path (Medusa, arXiv 2401.10774, 2.3.3), and the
    first m nodes are the best tree of m nodes. Raises UsageError for a table that is not one of
    accuracies, and for a number of nodes out of range.
    """
    _require_accuracies(accuracies)
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"nodes is {nodes}: give a whole number from 1 to {MAX_NODES}")
    return likeliest(accuracies, nodes)


def _require_accuracies(accuracies: Accuracies) -> None:
    for head, row in enumerate(accuracies):
        if any(not isfinite(a) or not 0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-4:
            raise UsageError(
                f"the accuracies of head {head} are {list(row)!r:.60}: give numbers from 0 to 1 "
                "with a sum of at most 1"
            )
