"""What a tree promises: tokens a step, from how often each head's guesses are right. No torch."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError

Accuracies = Sequence[Sequence[float]]  # [k][i]: head k's (i+1)-th prediction, alone, is right


def node_value(choice: Choice, accuracies: Accuracies) -> float:
    """Product of the accuracies along the path; a rank that was not measured counts nothing."""
    return prod(
        accuracies[depth][rank] if rank < len(accuracies[depth]) else 0.0
        for depth, rank in enumerate(choice)
    )


def expected_lengths(tree: Tree, accuracies: Accuracies) -> tuple[float, ...]:
    """Tokens a step with the first 1, 2, ... n nodes: 1, and the worth of every node but the root.

    Medusa, arXiv 2401.10774, section 2.3.3. Raises UsageError for a tree that is too deep.
    """
    if tree.depth > len(accuracies):
        raise UsageError(f"the tree is {tree.depth} deep, the table has {len(accuracies)} heads")
    worths = (node_value(choice, accuracies) for choice in tree.choices[1:])
    return tuple(accumulate(worths, initial=1.0))


def expected_length(tree: Tree, accuracies: Accuracies) -> float:
    """Tokens a step that the table promises for the whole tree."""
    return expected_lengths(tree, accuracies)[-1]
