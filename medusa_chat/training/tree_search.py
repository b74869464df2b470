"""The best tree for a table of rank accuracies. Plain numbers, no torch."""

from heapq import heappop, heappush
from math import isfinite

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.expected_length import Accuracies


def search_tree(accuracies: Accuracies, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root counted, with the longest expected path.

    accuracies[k][i]: how often the (i+1)-th prediction of head k alone is right. The value of a
    node is the product of the accuracies along its path (Medusa, arXiv 2401.10774, 2.3.3). Nodes
    are added by falling value, which is never above the parent's, so the first m of them are the
    best tree of m nodes. Nodes of value 0 are left out. Raises UsageError for a table that is not
    one of accuracies, and for a number of nodes out of range.
    """
    _require_accuracies(accuracies)
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"nodes is {nodes}: give a whole number from 1 to {MAX_NODES}")
    frontier: list[tuple[float, int, Choice]] = []
    choices: list[Choice] = []
    _push_children(frontier, (), accuracies, 1.0)
    while frontier and len(choices) < nodes - 1:
        negative, _, choice = heappop(frontier)
        choices.append(choice)
        _push_children(frontier, choice, accuracies, -negative)
    return Tree.from_choices(choices)


def _push_children(
    frontier: list[tuple[float, int, Choice]], choice: Choice, accuracies: Accuracies, value: float
) -> None:
    if len(choice) < len(accuracies):
        for rank, accuracy in enumerate(accuracies[len(choice)]):
            if value * accuracy > 0:
                child = (*choice, rank)
                heappush(frontier, (-value * accuracy, len(child), child))


def _require_accuracies(accuracies: Accuracies) -> None:
    for head, row in enumerate(accuracies):
        if any(not isfinite(a) or not 0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-4:
            raise UsageError(
                f"the accuracies of head {head} are {list(row)!r:.60}: give numbers from 0 to 1 "
                "with a sum of at most 1"
            )
