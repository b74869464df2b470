"""Expected length: tokens that a step with a tree brings, by the heads' accuracies. No torch."""

from collections.abc import Sequence
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
