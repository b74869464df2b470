"""The Tune tab as data: accuracies, the tree, its curves, what is offered. No gradio, no torch."""

from dataclasses import asdict, dataclass
from typing import Any

from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import ModelInfo, TreeFacts
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.personal_tree import StoredCounts
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.expected_length import Accuracies, node_value
from medusa_chat.trees.suggestion import LEAST_STEPS, TreeSuggestion, costs_of
from medusa_chat.ui.page.status import without_folders
from medusa_chat.ui.page.tree_view import short
from medusa_chat.ui.tune.curves import speedup_view, times_view, token_curves

EMPTY = {
    "empty": "No model is loaded. Choose one in the Models tab: its heads, its tree and what they "
    "cost on this machine are shown here.",
    "failed": "No model is loaded: the last one could not be. The Models tab says why.",
    "loading": "The model is being loaded. Its heads and its tree are shown here as soon as it is.",
}
PUBLISHED = "The published tree mc_sim_7b_63"
NO_HEADS = (
    "This model has no Medusa heads, so there is no tree to tune: it drafts by prompt lookup. "
    "`medusa-chat train --backbone ID --data FILE --output DIR` makes heads for it."
)


@dataclass(frozen=True)
class TuneStatus:
    """A visitor's request to the tuner: a sentence while it waits, runs or has failed."""

    text: str = ""
    running: bool = False
    failed: bool = False


def tune_view(
    state: ModelState,
    kept: StoredCounts | None,
    suggestion: TreeSuggestion | None,
    work: TuneStatus = TuneStatus(),
    is_guest: bool = False,
) -> dict[str, Any]:
    """Everything the tab draws. kept: of the loaded heads; None where there are none. A guest sees
    the same, but for the names of files and folders, and may change nothing."""
    model = state.model
    if model is None:
        return {"text": EMPTY.get(state.status, EMPTY["empty"]), "guest": is_guest}
    name = without_folders(model.name) if is_guest else model.name
    if model.tree_facts is None or kept is None:
        return {"text": NO_HEADS, "guest": is_guest, "model": name}
    facts = model.tree_facts
    used = used_accuracies(facts, kept)
    costs = costs_of(facts)
    return {
        "text": "",
        "guest": is_guest,
        "model": name,
        "device": f"{model.precision}, {model.device}",
        "tables": tables(facts, kept.counts, is_guest),
        "tree": tree_view(model, facts, used),
        "tokens": token_curves(facts, used),
        "times": times_view(costs, facts.date),
        "speedup": speedup_view(facts, used, costs),
        "chats": chats_text(kept.counts),
        "offer": None if suggestion is None else suggestion_view(suggestion),
        "work": asdict(TuneStatus() if is_guest else work),
    }


def used_accuracies(facts: TreeFacts, kept: StoredCounts) -> Accuracies:
    """The table by which the tree in use is cut."""
    return kept.tree.accuracies if facts.is_personal and kept.tree else facts.accuracies


# ---- accuracies ----


def tables(
    facts: TreeFacts, counts: AcceptanceCounts, is_guest: bool = False
) -> list[dict[str, Any]]:
    """The checkpoint's rank accuracies, and with what was counted in chats once there is any."""
    origin = "Calibration of the checkpoint" if facts.is_calibrated else "Published heads"
    rows = [[short(a) for a in row] for row in facts.accuracies]
    found = [{"name": origin, "note": _note(facts, is_guest), "rows": rows}]
    if counts.steps:
        note = (
            f"{counts.steps:,} steps of {_plural(counts.answers, 'answer')} with this model, "
            "where what the heads guessed was compared with what came. Few counts are drawn "
            "towards the table before; a rank that was never asked for keeps its value."
        )
        rows = [[short(a) for a in row] for row in counts.table(facts.accuracies)]
        asked = asked_of(counts, facts)
        found.append({"name": "Counted in your chats", "note": note, "rows": rows, "asked": asked})
    return found


def asked_of(counts: AcceptanceCounts, facts: TreeFacts) -> list[list[int]]:
    """How often each rank of each head was compared with what came."""
    return [
        [counts.ranks.get((head, rank), [0, 0])[1] for rank in range(len(row))]
        for head, row in enumerate(facts.accuracies)
    ]


def _note(facts: TreeFacts, is_guest: bool) -> str:
    if not facts.is_calibrated:
        return (
            "These heads were never measured: taken are the accuracies published for the first "
            "Medusa heads (7B). `medusa-chat calibrate` measures these ones."
        )
    what = facts.measured_on if facts.measured_on and not is_guest else "Held-out answers"
    places = f", {facts.positions:,} positions" if facts.positions else ""
    return f"{what}{places}: how often each prediction of each head, alone, was the token."


# ---- the tree ----


def tree_view(model: ModelInfo, facts: TreeFacts, used: Accuracies) -> dict[str, Any]:
    """The tree in use, a list entry per node, the root first. rank counts from 1; worth: the chance
    that the whole path to a node is what comes, by the table."""
    whole = Tree.from_choices(facts.choices)
    tree = whole.head(model.nodes)
    own = "The checkpoint's calibrated tree" if facts.is_calibrated else PUBLISHED
    return {
        "name": "Your personal tree" if facts.is_personal else own,
        "nodes": len(tree),
        "whole": len(whole),
        "depth": tree.depth,
        "heads": model.heads,
        "reason": model.tree_reason,
        "personal": facts.is_personal,
        "parent": list(tree.parents),
        "rank": [None if rank < 0 else rank + 1 for rank in tree.ranks],
        "worth": [short(node_value(choice, used)) for choice in tree.choices],
    }


# ---- chats and the suggestion from them ----


def chats_text(counts: AcceptanceCounts) -> str:
    """How much was counted, and what it still takes to search a tree."""
    if not counts.steps:
        return "Nothing is counted yet: chat with this model, and its own accuracies grow here."
    text = f"{counts.steps:,} steps of {_plural(counts.answers, 'answer')} are counted."
    more = f" From {LEAST_STEPS} steps on a better tree is looked for."
    return text + more if counts.steps < LEAST_STEPS else text


def suggestion_view(found: TreeSuggestion) -> dict[str, Any]:
    """The better tree in a sentence."""
    return {
        "text": f"A better tree for your chats: expected {found.tokens:.2f} instead of "
        f"{found.now:.2f} tokens a step.",
        "note": f"{found.nodes} nodes; {(found.gain - 1) * 100:.1f} % faster, by what was counted "
        "in your chats. It is used from the next answer on.",
    }


def _plural(value: int, word: str) -> str:
    return f"{value:,} {word}" if value == 1 else f"{value:,} {word}s"
