"""TreeSuggestion: a tree that suits the user's chats better than the one in use."""

from dataclasses import dataclass

from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import PersonalTree, TreeFacts
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.greedy_search import likeliest
from medusa_chat.trees.path_probabilities import PathProbabilities
from medusa_chat.trees.pick import Pick, pick

LEAST_STEPS = 200  # counted before a tree is searched
GAIN = 1.02  # least ratio of expected speedups for a suggestion
CAUTION = 0.7  # factor on the stored accuracy of a rank that was never drafted in these chats


@dataclass(frozen=True)
class TreeSuggestion:
    """A better tree than the one in use. nodes: the size at which it pays best. tokens, now:
    expected tokens a step with it and with the tree in use, each at its best size. gain: ratio of
    the expected speedups, on the half of the chats that the tree was not searched in."""

    tree: PersonalTree
    nodes: int
    tokens: float
    now: float
    gain: float


def suggest_tree(counts: AcceptanceCounts, facts: TreeFacts, nodes: int) -> TreeSuggestion | None:
    """The best tree by all counts; None where it would not pay, or too little was counted.

    Two-fold cross-validation: a tree judged by the counts it was searched in looks better than it
    is. So one tree is searched in each half and compared with the tree in use on the other half;
    both must win by more than GAIN. nodes: the size of the tree in use.
    """
    if counts.steps < LEAST_STEPS or min(fold.steps for fold in counts.folds) < LEAST_STEPS // 4:
        return None
    used, size = Tree.from_choices(facts.choices), max(len(facts.choices) + 1, nodes)
    folds = [PathProbabilities(fold, facts.accuracies, CAUTION) for fold in counts.folds]
    trees = [search_likeliest(paths, size) for paths in folds]
    gains = [
        _best(held_out, tree, facts, nodes).speedup / _best(held_out, used, facts, nodes).speedup
        for held_out, tree in zip(folds, reversed(trees), strict=True)
    ]
    if min(gains) <= GAIN:
        return None
    whole = PathProbabilities(counts.whole, facts.accuracies, CAUTION)
    found = search_likeliest(whole, size)
    best, here = _best(whole, found, facts, nodes), _best(whole, used, facts, nodes)
    accuracies = counts.whole.table(facts.accuracies)
    table = tuple(tuple(round(a, 5) for a in row) for row in accuracies)
    tree, gain = PersonalTree(table, found.choices[1:]), sum(gains) / len(gains)
    return TreeSuggestion(tree, best.nodes, best.tokens, here.tokens, gain)


def search_likeliest(paths: PathProbabilities, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes with the most expected tokens a step, its nodes in order of
    value."""
    return likeliest(paths.table, paths.share, nodes)


def costs_of(facts: TreeFacts) -> StepCosts | None:
    """The measured step times of a model; None before the tuner ran."""
    return StepCosts(facts.sizes, facts.lengths, facts.seconds) if facts.sizes else None


def _best(paths: PathProbabilities, tree: Tree, facts: TreeFacts, nodes: int) -> Pick:
    """A tree at its best size. Before step times were measured: at `nodes` nodes, as if they cost
    nothing."""
    expected, costs = paths.expected(tree), costs_of(facts)
    if costs is None:
        size = min(nodes, len(expected))
        return Pick(size, expected[size - 1], 1.0)
    return pick(costs, expected, costs.lengths[0])
