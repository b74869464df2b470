"""Made-up costs of steps: as a profiler would have measured them, and as a budget knows them."""

from medusa_chat.bench.step_costs import StepCosts
from medusa_chat.bench.step_profiler import SIZES
from medusa_chat.decoding.budget import Budget, StepTimes
from medusa_chat.trees.expected_length import expected_lengths, likeliest

ACCURACIES = ((0.6, 0.15, 0.1, 0.05), (0.5, 0.15, 0.1, 0.05), (0.4, 0.15, 0.1, 0.05))
TREE = likeliest(ACCURACIES, 64)
EXPECTED = expected_lengths(TREE, ACCURACIES)


def costs_of(per_node: float, per_token: float = 0.0, lengths=(100, 1100)) -> StepCosts:
    """A step of n nodes takes 1 + per_node * (n - 1), and more behind a long text."""
    rows = [
        tuple(1 + (n - 1) * (per_node + per_token * (length - lengths[0])) for n in SIZES)
        for length in lengths
    ]
    return StepCosts(SIZES, lengths, tuple(rows))


def times_of(per_node: float, draft: float = 0.0) -> StepTimes:
    """A step of n nodes costs 1 + per_node * (n - 1) plain steps, and the heads `draft`."""
    return StepTimes([1 + per_node * n for n in range(80)], draft)


def budget_of(per_node: float, usual: int = 4, is_cut: bool = True, draft: float = 0.0) -> Budget:
    """At the beginning of an answer, for a tree of `usual` nodes, whose drafts brought so far what
    the accuracies promise."""
    budget = Budget(times_of(per_node, draft))
    budget.begin(EXPECTED[:usual], is_cut)
    budget._given, budget._spent = EXPECTED[usual - 1], budget._by_heads[usual - 1]
    return budget
