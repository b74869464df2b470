"""The Tune tab as data: accuracies, the tree, its curves over the nodes. No gradio, no torch."""

from collections.abc import Sequence
from typing import Any

from medusa_chat.decoding.events import Learnt
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import ModelInfo, TreeFacts
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.trees.expected_length import expected_lengths, likeliest, node_value
from medusa_chat.ui.page.status import without_folders
from medusa_chat.ui.page.tree_view import short

MOST_NODES = 128  # of the curve of searched trees
EMPTY = {
    "empty": "No model is loaded. Choose one in the Models tab: its heads, its tree and what they "
    "cost on this machine are shown here.",
    "failed": "No model is loaded: the last load failed. The Models tab says why.",
    "loading": "The model is being loaded. Its heads and its tree are shown here as soon as it is.",
}
PUBLISHED = "The published tree mc_sim_7b_63"
NO_HEADS = (
    "This model has no Medusa heads, so there is no tree to tune: it drafts by prompt lookup. "
    "`medusa-chat train --backbone ID --data FILE --output DIR` makes heads for it."
)


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


def tune_view(state: ModelState, is_guest: bool = False) -> dict[str, Any]:
    """Everything the tab draws. A guest sees the same, but for the names of files and folders, and
    may change nothing."""
    model = state.model
    if model is None:
        return {"text": EMPTY.get(state.status, EMPTY["empty"]), "guest": is_guest}
    name = without_folders(model.name) if is_guest else model.name
    if model.tree_facts is None:
        return {"text": NO_HEADS, "guest": is_guest, "model": name}
    facts = model.tree_facts
    return {
        "text": "",
        "guest": is_guest,
        "model": name,
        "device": f"{model.precision}, {model.device}",
        "table": table_view(facts, is_guest),
        "tree": tree_view(model, facts),
        "tokens": token_curves(facts),
        "costs": costs_view(state.learnt),
        "speedup": speedup_view(facts, state.learnt),
    }


def table_view(facts: TreeFacts, is_guest: bool = False) -> dict[str, Any]:
    """The checkpoint's rank accuracies, or the published ones."""
    origin = "Calibration of the checkpoint" if facts.is_calibrated else "Published heads"
    rows = [[short(a) for a in row] for row in facts.accuracies]
    return {"name": origin, "note": _note(facts, is_guest), "rows": rows}


def _note(facts: TreeFacts, is_guest: bool) -> str:
    if not facts.is_calibrated:
        return (
            "These heads were never measured, so the accuracies published for the first Medusa "
            "heads (7B) are used. `medusa-chat calibrate` measures these heads."
        )
    what = facts.measured_on if facts.measured_on and not is_guest else "Held-out answers"
    places = f", {facts.positions:,} positions" if facts.positions else ""
    return f"{what}{places}: how often each single prediction of each head was right."


def tree_view(model: ModelInfo, facts: TreeFacts) -> dict[str, Any]:
    """The tree in use, a list entry per node, the root first. rank counts from 1; worth: the chance
    that the whole path to a node is what comes, by the table."""
    whole = Tree.from_choices(facts.choices)
    tree = whole.head(model.nodes)
    return {
        "name": "The checkpoint's calibrated tree" if facts.is_calibrated else PUBLISHED,
        "nodes": len(tree),
        "whole": len(whole),
        "depth": tree.depth,
        "heads": model.heads,
        "reason": model.tree_reason,
        "parent": list(tree.parents),
        "rank": [None if rank < 0 else rank + 1 for rank in tree.ranks],
        "worth": [short(node_value(choice, facts.accuracies)) for choice in tree.choices],
    }
