"""The Tune tab's curves over the nodes, as data: tokens, times, speedup. No gradio, no torch."""

from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import TreeFacts
from medusa_chat.trees.expected_length import expected_lengths, likeliest
from medusa_chat.trees.pick import Pick, pick, plain_wins
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


def times_view(costs: StepCosts | None, date: str) -> dict[str, Any] | None:
    """Milliseconds of a step by nodes, a line for each length of text that was measured."""
    if costs is None:
        return None
    lines = [
        {"length": length, "ms": [short(second * 1000) for second in row]}
        for length, row in zip(costs.lengths, costs.seconds, strict=True)
    ]
    return {"nodes": list(costs.sizes), "lines": lines, "date": date[:10]}


def speedup_view(facts: TreeFacts, costs: StepCosts | None) -> dict[str, Any] | None:
    """Predicted speedup of the tree in use over plain decoding, cut to each number of nodes."""
    if costs is None:
        return None
    expected = expected_lengths(Tree.from_choices(facts.choices), facts.accuracies)
    sizes = [m for m in costs.sizes if m <= len(expected)]
    lines = []
    for length in costs.lengths:
        best = pick(costs, expected, length)
        points = [[m, short(expected[m - 1] / costs.overhead(m, length))] for m in sizes]
        lines.append({"length": length, "points": points, "best": _pick(best)})
    is_plain = pick(costs, expected, costs.lengths[0]).nodes == 1
    words = plain_wins(costs, expected)
    return {"lines": lines, "plain": f"{words[0].upper()}{words[1:]}." if is_plain else ""}


def _pick(best: Pick) -> dict[str, Any]:
    figures = {"speedup": best.speedup, "tokens": best.tokens, "overhead": best.overhead}
    return {"nodes": best.nodes} | {name: round(value, 2) for name, value in figures.items()}


def _thin(values: Sequence[float]) -> list[list[float]]:
    """[nodes, value] at every size up to 32 and every fourth beyond."""
    return [[m, short(values[m - 1])] for m in _thin_sizes(range(1, len(values) + 1))]


def _thin_sizes(sizes: Sequence[int]) -> list[int]:
    return [m for m in sizes if m <= 32 or m % 4 == 0 or m == sizes[-1]]
