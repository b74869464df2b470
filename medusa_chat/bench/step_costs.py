"""StepCosts: the measured time of a step of n nodes. No torch."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class StepCosts:
    """seconds[i][j]: a whole step of sizes[j] nodes behind lengths[i] tokens in the cache.

    sizes: rising, from 1 (plain decoding). lengths: rising. drafting[j]: seconds of it that the
    heads took. Raises ValueError on anything else.
    """

    sizes: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    drafting: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.sizes[:1] != (1,) or not _rises(self.sizes) or not _rises(self.lengths):
            raise ValueError("sizes must increase from 1, and lengths must increase")
        if len(self.seconds) != len(self.lengths) or not self.lengths:
            raise ValueError("seconds must have one row per length")
        known = len(self.drafting) in (0, len(self.sizes))
        if not known or not all(0 <= value < 1e6 for value in self.drafting):
            raise ValueError("drafting must have one time per size")
        for row in self.seconds:
            if len(row) != len(self.sizes) or not all(0 < value < 1e6 for value in row):
                raise ValueError("each row must have one positive time per size")

    def at(self, nodes: int, length: int) -> float:
        """Seconds of a step, interpolated linearly; beyond the longest measured text extrapolated,
        for the time of attention goes on rising."""
        row = [_between(self.sizes, seconds, nodes) for seconds in self.seconds]
        if len(row) == 1:
            return row[0]
        return max(_between(self.lengths, row, max(length, self.lengths[0])), min(row))

    def drafted(self, usual: int, most: int, length: int) -> tuple[float, ...]:
        """Seconds of steps of 1, 2, ... `most` nodes, never falling. Each includes the heads' time
        of a step of `usual` nodes: the heads run before it is known how many nodes are kept."""
        whole, heads = self.at(usual, length), self._heads(usual)
        near = [min(self.at(m, length) - self._heads(m) + heads, whole) for m in range(1, usual)]
        far = [self.at(m, length) for m in range(usual, most + 1)]
        return tuple(accumulate([*near, *far], max))[:most]

    def undrafted(self, most: int, length: int) -> tuple[float, ...]:
        """Seconds of steps of 1, 2, ... `most` nodes that no head drafted, never falling."""
        rest = [self.at(m, length) - self._heads(m) for m in range(2, most + 1)]
        return tuple(accumulate([self.at(1, length), *rest], max))

    def _heads(self, nodes: int) -> float:
        """Seconds of a step of so many nodes that the heads take."""
        return _between(self.sizes, self.drafting, nodes) if self.drafting else 0.0

    def overhead(self, nodes: int, length: int) -> float:
        """Seconds of a step over those of a plain one (the paper's word)."""
        return self.at(nodes, length) / self.at(1, length)


def _rises(values: Sequence[int]) -> bool:
    return all(a < b for a, b in zip(values, values[1:], strict=False))


def _between(places: Sequence[int], values: Sequence[float], at: int) -> float:
    """Linear interpolation of `values` over `places`, or extrapolation from the last two."""
    if len(places) == 1:
        return values[0]
    right = min(max(bisect_left(places, at), 1), len(places) - 1)
    left = right - 1
    share = (at - places[left]) / (places[right] - places[left])
    return values[left] + share * (values[right] - values[left])
