"""likeliest(): the tree of the likeliest paths, searched greedily. No torch."""

from heapq import heappop, heappush

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.trees.expected_length import Accuracies


def likeliest(accuracies: Accuracies, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root counted, with the longest expected path.

    accuracies: a row for each depth that it may have. Nodes are added by falling value, the
    product of the accuracies along their path, which is never above the parent's, so the first m of
    them are the best tree of m nodes. Nodes of value 0 are left out.
    """
    frontier: list[tuple[float, int, Choice]] = []
    choices: list[Choice] = []

    def push(above: Choice, probability: float) -> None:
        if len(above) < len(accuracies):
            for rank, accuracy in enumerate(accuracies[len(above)]):
                if (value := probability * accuracy) > 0:
                    heappush(frontier, (-value, len(above), (*above, rank)))

    push((), 1.0)
    while frontier and len(choices) < nodes - 1:
        negative, _, choice = heappop(frontier)
        choices.append(choice)
        push(choice, -negative)
    return Tree.from_choices(choices)
