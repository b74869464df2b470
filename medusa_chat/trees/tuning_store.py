"""Tuning: what the tuner measured for one model on one device, kept on disk; what follows from it.

Costs are kept, not the choice: the choice is made anew from the checkpoint's accuracies each time,
so heads that were trained again need no new measurement.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.trees.pick import Pick, pick, plain_wins

VERSION = 3
MOST_BYTES = 100_000


@dataclass(frozen=True)
class TuningKey:
    """The key of measured step times: another key is measured again. backbone: see ModelInfo;
    device: name and threads."""

    model: str
    backbone: str
    precision: str
    device: str
    software: str

    @property
    def file(self) -> Path:
        words = json.dumps(asdict(self), sort_keys=True)
        digest = hashlib.sha256(words.encode()).hexdigest()[:16]
        return paths.state_dir() / "tuner" / f"{digest}.json"


@dataclass(frozen=True)
class Tuning:
    """Step costs of one place. parameters: of the backbone, to know another model of that name;
    date: ISO, in UTC."""

    place: TuningKey
    parameters: int
    costs: StepCosts
    date: str

    def pick(self, expected: Sequence[float]) -> Pick:
        """How many of a tree's first nodes pay best behind the short text. expected[m - 1]: tokens
        a step with m of them (`expected_lengths`)."""
        return pick(self.costs, expected, self.costs.lengths[0])

    def pays_below(self, nodes: int, expected: Sequence[float]) -> bool:
        """Whether some size under `nodes`, measured or between what was, should pay behind the
        short text. expected: see `pick`."""
        length = self.costs.lengths[0]
        sizes = range(2, min(self.costs.sizes[-1], nodes, len(expected)))
        return any(expected[m - 1] > self.costs.overhead(m, length) for m in sizes)

    def reason(self, expected: Sequence[float]) -> str:
        """The choice and its reason, in words. expected: see `pick`."""
        best, day = self.pick(expected), self.date[:10]
        if best.nodes == 1:
            return f"{plain_wins(self.costs, expected)} (measured on {day})"
        return (
            f"{best.nodes} nodes: {best.tokens:.2f} expected tokens per step at "
            f"{best.overhead:.2f} times the cost, {best.speedup:.2f} times plain decoding, "
            f"by step times measured on this device on {day}"
        )

    def summary(self) -> str:
        """The costs in one line."""
        length = self.costs.lengths[0]
        costs = ", ".join(f"{self.costs.overhead(m, length):.2f} at {m}" for m in self.costs.sizes)
        return f"a step's time over a plain one's by nodes: {costs} ({self.date[:10]})"


def read(place: TuningKey, parameters: int | None = None) -> Tuning | None:
    """What was kept for a place; None where there is nothing, or nothing that can be used.

    parameters: of the loaded backbone; a tuning of another size is ignored.
    """
    found = _read(place.file)
    return found if found and parameters in (None, found.parameters) else None


def write(tuning: Tuning) -> None:
    """Keep it, whole or not at all. Raises OSError."""
    values = {"version": VERSION, **asdict(tuning)}
    paths.write_text(tuning.place.file, json.dumps(values) + "\n")


def all_tunings() -> Iterator[Tuning]:
    """Everything that was kept, the latest first."""
    folder = paths.state_dir() / "tuner"
    files = folder.glob("*.json") if folder.is_dir() else ()
    found = [tuning for file in files if (tuning := _read(file)) is not None]
    yield from sorted(found, key=lambda tuning: tuning.date, reverse=True)


def _read(file: Path) -> Tuning | None:
    """One file; None where it is missing, older, damaged or not ours: it is only a cache."""
    try:
        with open(file, "rb") as stream:
            values: Any = json.loads(stream.read(MOST_BYTES))
        if values.pop("version") != VERSION:
            return None
        costs = values["costs"]
        return Tuning(
            place=TuningKey(**{name: str(value) for name, value in values["place"].items()}),
            parameters=int(values["parameters"]),
            costs=StepCosts(
                tuple(map(int, costs["sizes"])),
                tuple(map(int, costs["lengths"])),
                tuple(tuple(map(float, row)) for row in costs["seconds"]),
                tuple(map(float, costs["drafting"])),
            ),
            date=str(values["date"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
