"""likeliest(): the tree of the likeliest paths, searched greedily. No torch."""

from collections.abc import Callable
from heapq import heappop, heappush

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.trees.expected_length import Accuracies


def likeliest(table: Accuracies, share: Callable[[Choice], float], nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root counted, with the longest expected path.

    table: as many rows as the tree may be deep, each with an entry for every rank; share(choice):
    the probability of the last rank of a path, given the rest. Nodes are added by falling value,
    the product of the shares along their path, which is never above the parent's, so the first m
    of them are the best tree of m nodes. Nodes of value 0 are left out.
    """
    frontier: list[tuple[float, int, Choice]] = []
    choices: list[Choice] = []

    def push(above: Choice, probability: float) -> None:
        if len(above) < len(table):
            for rank in range(len(table[len(above)])):
                choice = (*above, rank)
                if (value := probability * share(choice)) > 0:
                    heappush(frontier, (-value, len(choice), choice))

    push((), 1.0)
    while frontier and len(choices) < nodes - 1:
        negative, _, choice = heappop(frontier)
        choices.append(choice)
        push(choice, -negative)
    return Tree.from_choices(choices)
