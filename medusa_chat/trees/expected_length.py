"""Expected length: what a tree brings by the heads' accuracies, and which brings most. No torch."""

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import accumulate
from math import prod

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError

Accuracies = Sequence[Sequence[float]]  # [k][i]: how often head k's (i+1)-th prediction is right


def node_value(choice: Choice, accuracies: Accuracies) -> float:
    """Product of the accuracies along the path; a rank that was not measured has accuracy 0."""
    return prod(
        accuracies[depth][rank] if rank < len(accuracies[depth]) else 0.0
        for depth, rank in enumerate(choice)
    )


def expected_lengths(tree: Tree, accuracies: Accuracies) -> tuple[float, ...]:
    """Tokens a step with the first 1, 2, ... n nodes: 1, plus the value of every other node.

    Medusa, arXiv 2401.10774, section 2.3.3. Raises UsageError for a tree that is too deep.
    """
    if tree.depth > len(accuracies):
        raise UsageError(
            f"the tree has depth {tree.depth} and the accuracy table {len(accuracies)} heads: "
            f"choose a tree of depth {len(accuracies)} or less"
        )
    values = (node_value(choice, accuracies) for choice in tree.choices[1:])
    return tuple(accumulate(values, initial=1.0))


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
