"""Step costs as a tuner would have measured them."""

from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.runtime.step_profiler import SIZES
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
