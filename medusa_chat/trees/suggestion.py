"""TreeSuggestion: a tree that suits the user's chats better than the one in use."""

from dataclasses import dataclass

from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import PersonalTree, TreeFacts
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.expected_length import Accuracies, expected_lengths, likeliest
from medusa_chat.trees.pick import Pick, pick

LEAST_STEPS = 200  # counted before a tree is searched
GAIN = 1.03  # least ratio of expected speedups: by its own counts any tree looks a little better
CAUTION = 0.7  # factor on the stored accuracy of a rank that was never drafted in these chats


@dataclass(frozen=True)
class TreeSuggestion:
    """A better tree than the one in use. nodes: the size at which it pays best. tokens, now:
    expected tokens a step with it and with the tree in use, each at its best size. gain: ratio of
    the expected speedups."""

    tree: PersonalTree
    nodes: int
    tokens: float
    now: float
    gain: float


def suggest_tree(counts: AcceptanceCounts, facts: TreeFacts, nodes: int) -> TreeSuggestion | None:
    """The best tree by the counts; None where it would not pay, or too little was counted. nodes:
    the size of the tree in use."""
    if counts.steps < LEAST_STEPS:
        return None
    used = Tree.from_choices(facts.choices)
    table = counts.table(facts.accuracies, CAUTION)
    found = likeliest(table, max(len(used), nodes))
    best, here = (_best(tree, table, facts, nodes) for tree in (found, used))
    gain = best.speedup / here.speedup
    if gain <= GAIN:
        return None
    rows = counts.table(facts.accuracies)
    tree = PersonalTree(tuple(tuple(round(a, 5) for a in row) for row in rows), found.choices[1:])
    return TreeSuggestion(tree, best.nodes, best.tokens, here.tokens, gain)


def costs_of(facts: TreeFacts) -> StepCosts | None:
    """The measured step times of a model; None before the tuner ran."""
    return StepCosts(facts.sizes, facts.lengths, facts.seconds) if facts.sizes else None


def _best(tree: Tree, accuracies: Accuracies, facts: TreeFacts, nodes: int) -> Pick:
    """A tree at its best size. Before step times were measured: at `nodes` nodes, as if they cost
    nothing."""
    expected, costs = expected_lengths(tree, accuracies), costs_of(facts)
    if costs is None:
        size = min(nodes, len(expected))
        return Pick(size, expected[size - 1], 1.0)
    return pick(costs, expected, costs.lengths[0])
