"""Pick: how many nodes of a tree pay best, by measured costs and expected tokens. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from medusa_chat.decoding.step_costs import StepCosts


@dataclass(frozen=True)
class Pick:
    """How many nodes pay best. tokens: expected a step; overhead: a step's time over a plain
    step's; speedup: tokens / overhead, against plain decoding."""

    nodes: int
    tokens: float
    overhead: float

    @property
    def speedup(self) -> float:
        return self.tokens / self.overhead


def pick(costs: StepCosts, expected: Sequence[float], length: int) -> Pick:
    """The measured size with the best expected tokens over step time; plain decoding wins a tie.

    expected[m - 1]: tokens a step with the first m nodes (`expected_lengths`). Only measured sizes
    are considered, and the whole tree, also where its size was not measured.
    """
    end = min(len(expected), costs.sizes[-1])
    sizes = [m for m in costs.sizes if m < end] + [end]
    found = [Pick(m, expected[m - 1], costs.overhead(m, length)) for m in sizes]
    return max(found, key=lambda p: p.speedup)  # of equal ones the first, the smallest


def plain_wins(costs: StepCosts, expected: Sequence[float]) -> str:
    """Why plain decoding is picked behind the shortest text that was measured."""
    length = costs.lengths[0]
    sizes = [m for m in costs.sizes if 1 < m <= len(expected)]
    if not sizes:
        return "plain decoding is faster than Medusa here: no draft is cheap enough to pay"
    speeds = {m: expected[m - 1] / costs.overhead(m, length) for m in sizes}
    best = max(sizes, key=lambda m: speeds[m])
    return (
        f"plain decoding is faster than Medusa here: the best draft, {best} nodes, would reach "
        f"{speeds[best]:.2f} of its speed"
    )
