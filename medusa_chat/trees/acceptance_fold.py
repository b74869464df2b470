"""AcceptanceFold: counts of right and asked, by rank and by path, of one half of the answers."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from medusa_chat.decoding.tree import Choice
from medusa_chat.trees.expected_length import Accuracies

MOST_PATHS = 3000  # of one half that are kept, the most asked ones
HEAD_WEIGHT = 50  # the stored calibration counts as so many askings of a rank

Count = list[int]  # [right, asked]


@dataclass
class AcceptanceFold:
    """Counts of one half of the answers, for cross-validation.

    ranks[k, i]: of head k's prediction i, both from 0. paths[c], c the ranks along a path: asked
    where its last rank was drafted and the rest of it followed, right where all of it followed.
    """

    ranks: dict[Choice, Count] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    paths: dict[Choice, Count] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    steps: int = 0

    def count(self, drafted: Sequence[Mapping[int, int]], following: Sequence[int]) -> None:
        """Count one step. drafted[k]: token -> rank of head k. following: the token ids that
        followed its root in the answer."""
        path: Choice | None = ()
        self.steps += 1
        for head, (ranks, token) in enumerate(zip(drafted, following, strict=False)):
            right = ranks.get(token)
            for rank in ranks.values():
                _add(self.ranks[head, rank], rank == right)
                if path is not None:
                    _add(self.paths[*path, rank], rank == right)
            path = None if path is None or right is None else (*path, right)

    def table(self, prior: Accuracies) -> list[list[float]]:
        """Rank accuracies a[k][i] = (right + HEAD_WEIGHT * prior) / (asked + HEAD_WEIGHT): the
        counted share, smoothed by the prior. Each row adds up to at most 1."""
        return [
            _at_most_one(
                [smoothed_share(self.ranks.get((k, i)), a, HEAD_WEIGHT) for i, a in enumerate(r)]
            )
            for k, r in enumerate(prior)
        ]

    def halve(self) -> None:
        """Halve every count, so that later answers weigh more."""
        self.steps //= 2
        for counts in (self.ranks, self.paths):
            for name, (right, asked) in list(counts.items()):
                counts[name] = [right // 2, asked // 2]

    def plus(self, other: "AcceptanceFold") -> "AcceptanceFold":
        """The sums of both."""
        total = AcceptanceFold(steps=self.steps + other.steps)
        for fold in (self, other):
            for name in ("ranks", "paths"):
                sums = getattr(total, name)
                for key, (right, asked) in getattr(fold, name).items():
                    sums[key] = [sums[key][0] + right, sums[key][1] + asked]
        return total

    def to_json(self) -> dict[str, Any]:
        most = sorted(self.paths.items(), key=lambda item: (-item[1][1], item[0]))[:MOST_PATHS]
        return {
            "steps": self.steps,
            "ranks": {_name(key): count for key, count in sorted(self.ranks.items())},
            "paths": {_name(key): count for key, count in sorted(most) if count[1]},
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """The counts in a JSON value. Raises ValueError, KeyError, TypeError or AttributeError."""
        fold = cls(steps=whole_number(values["steps"]))
        for name in ("ranks", "paths"):
            for key, (right, asked) in values[name].items():
                if not 0 <= whole_number(right) <= whole_number(asked):
                    raise ValueError(f"{name} {key}: {right} of {asked}")
                choice = tuple(whole_number(int(part)) for part in key.split("."))
                if max(choice) >= MOST_PATHS or (name == "ranks" and len(choice) != 2):
                    raise ValueError(f"{name} {key}")
                getattr(fold, name)[choice] = [right, asked]
        return fold


def _add(count: Count, is_right: bool) -> None:
    count[0] += is_right
    count[1] += 1


def smoothed_share(count: Count | None, prior: float, weight: int) -> float:
    """(right + weight * prior) / (asked + weight): the counted share, smoothed by a prior that
    counts as `weight` askings."""
    right, asked = count or (0, 0)
    return (right + weight * prior) / (asked + weight)


def _at_most_one(row: list[float]) -> list[float]:
    total = max(1.0, sum(row))
    return [share / total for share in row]


def _name(choice: Choice) -> str:
    return ".".join(map(str, choice))


def whole_number(value: Any) -> int:
    """The value where it is a count. Raises ValueError."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
