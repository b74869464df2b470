"""Shapes: trees that follow from a few numbers, the dense ones and chains."""

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError


def cartesian(*widths: int) -> Tree:
    """The dense tree: the top widths[k] of head k below every node of the depth before."""
    choices: list[Choice] = []
    frontier: list[Choice] = [()]
    for width in widths:
        if width < 1:
            raise UsageError(f"a dense tree needs widths of at least 1, got {widths}")
        frontier = [(*choice, rank) for choice in frontier for rank in range(width)]
        choices += frontier
        if len(choices) >= MAX_NODES:
            raise UsageError(f"the dense tree of {widths} has over {MAX_NODES} nodes: give fewer")
    return Tree.from_choices(choices)


def chain(depth: int) -> Tree:
    """The top prediction of each head; with exact acceptance, blockwise parallel decoding
    (Stern 2018, arXiv 1811.03115)."""
    return cartesian(*[1] * depth)
