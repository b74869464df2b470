"""The Tune tab's curves over the nodes, as data: tokens, costs, speedup. No gradio, no torch."""

from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.events import Learnt
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import TreeFacts
from medusa_chat.trees.expected_length import expected_lengths, likeliest
from medusa_chat.ui.page.tree_view import short

MOST_NODES = 128  # of the curve of searched trees


def token_curves(facts: TreeFacts) -> dict[str, Any]:
    """Tokens a step: expected of the tree in use and of the tree searched for each size, by the
    table; measured at calibration, where it was."""
    table = [list(row) for row in facts.accuracies]
    searched = expected_lengths(likeliest(table, MOST_NODES), table)
    tree = Tree.from_choices(facts.choices)
    return {
        "searched": _thin(searched),
        "used": _thin(expected_lengths(tree, table)),
        "calibration": [[nodes, short(rate)] for nodes, rate in facts.rates],
    }


def costs_view(learnt: Learnt | None) -> dict[str, Any] | None:
    """What a step of so many nodes costs, in plain steps, as answers have taught it."""
    if learnt is None:
        return None
    points = [[n, short(cost)] for n, cost in zip(learnt.nodes, learnt.costs, strict=True)]
    return {"points": points, "ms": short(1e3 * learnt.plain_seconds), "steps": learnt.steps}


def speedup_view(facts: TreeFacts, learnt: Learnt | None) -> dict[str, Any] | None:
    """Speedup of the tree in use over plain decoding, cut to each number of nodes: expected tokens,
    as far as they were kept, over the costs."""
    if learnt is None:
        return None
    expected = expected_lengths(Tree.from_choices(facts.choices), facts.accuracies)
    points = [
        [n, short((1 + learnt.trust * (expected[n - 1] - 1)) / cost)]
        for n, cost in zip(learnt.nodes, learnt.costs, strict=True)
        if n <= len(expected)
    ]
    best = max(points, key=lambda point: point[1])  # of equals the smallest
    return {"points": points, "best": best, "trust": short(learnt.trust)}


def _thin(values: Sequence[float]) -> list[list[float]]:
    """[nodes, value] at every size up to 32 and every fourth beyond."""
    sizes = range(1, len(values) + 1)
    return [[m, short(values[m - 1])] for m in sizes if m <= 32 or m % 4 == 0 or m == len(values)]
