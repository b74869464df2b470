"""TreeSuggestion: a tree searched in what was counted in chats, when it beats the one in use."""

from dataclasses import dataclass
from heapq import heappop, heappush

from medusa_chat.decoding.step_costs import StepCosts, pick
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.messages import PersonalTree, TreeFacts
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.path_probabilities import PathProbabilities

LEAST_STEPS = 200  # before a tree is searched in them
GAIN = 1.02  # of expected speedup, or no tree is offered
CAUTION = 0.7  # what a rank that was never drafted here counts of its stored accuracy


@dataclass(frozen=True)
class TreeSuggestion:
    """A better tree than the one in use. tokens, now: expected a step, of both, each at its best
    number of nodes. gain: of expected speedup, by the half of the chats it was not searched in."""

    tree: PersonalTree
    nodes: int
    tokens: float
    now: float
    gain: float


def suggest_tree(tally: AcceptanceCounts, facts: TreeFacts, nodes: int) -> TreeSuggestion | None:
    """The tree searched in everything counted, where such trees are worth it.

    A tree that is searched and judged by the same counts always looks better than it is. So one
    is searched in each fold, and judged against the tree in use by the other one: both must be
    better by more than GAIN. What was never drafted in these chats counts only CAUTION of what is
    stored, so that no offer rests on it alone.
    """
    if tally.steps < LEAST_STEPS or min(fold.steps for fold in tally.folds) < LEAST_STEPS // 4:
        return None
    used, size = Tree.from_choices(facts.choices), max(len(facts.choices) + 1, nodes)
    folds = [PathProbabilities(fold, facts.accuracies, CAUTION) for fold in tally.folds]
    trees = [search_likeliest(paths, size) for paths in folds]
    gains = [
        _speed(judge, tree, facts, nodes) / _speed(judge, used, facts, nodes)
        for judge, tree in zip(folds, reversed(trees), strict=True)
    ]
    if min(gains) <= GAIN:
        return None
    whole = PathProbabilities(tally.whole, facts.accuracies, CAUTION)
    found = search_likeliest(whole, size)
    best, here = _best(whole, found, facts, nodes), _best(whole, used, facts, nodes)
    counted = tally.whole.table(facts.accuracies)
    table = tuple(tuple(round(a, 5) for a in row) for row in counted)
    return TreeSuggestion(
        PersonalTree(table, found.choices[1:]), best[0], best[1], here[1], sum(gains) / len(gains)
    )


def search_likeliest(paths: PathProbabilities, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes that gives the most tokens a step by these paths, in order
    of value: the greedy search of training/tree_search.py over paths instead of ranks."""
    frontier: list[tuple[float, int, Choice]] = []
    choices: list[Choice] = []

    def push(above: Choice, worth: float) -> None:
        if len(above) < len(paths.table):
            for rank in range(len(paths.table[len(above)])):
                choice = (*above, rank)
                if (value := worth * paths.share(choice)) > 0:
                    heappush(frontier, (-value, len(choice), choice))

    push((), 1.0)
    while frontier and len(choices) < nodes - 1:
        negative, _, choice = heappop(frontier)
        choices.append(choice)
        push(choice, -negative)
    return Tree.from_choices(choices)


def costs_of(facts: TreeFacts) -> StepCosts | None:
    """The measured step times; None before there are any."""
    return StepCosts(facts.sizes, facts.lengths, facts.seconds) if facts.sizes else None


def _best(
    paths: PathProbabilities, tree: Tree, facts: TreeFacts, nodes: int
) -> tuple[int, float, float]:
    """(nodes, tokens a step, speedup) of the tree at its best size; before any step was timed at
    the size in use, where speedup is tokens."""
    expected, costs = paths.expected(tree), costs_of(facts)
    if costs is None:
        size = min(nodes, len(expected))
        return size, expected[size - 1], expected[size - 1]
    best = pick(costs, expected, costs.lengths[0])
    return best.nodes, best.tokens, best.speedup


def _speed(paths: PathProbabilities, tree: Tree, facts: TreeFacts, nodes: int) -> float:
    return _best(paths, tree, facts, nodes)[2]
