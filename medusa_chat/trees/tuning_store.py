"""Tuning: what the tuner measured for one model on one device, kept on disk; what follows from it.

Costs are kept, not the choice: the choice is made anew from the checkpoint's accuracies each time,
so heads that were trained again need no new measurement.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.decoding.draft_budget import DraftBudget
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.trees.expected_length import Accuracies, expected_lengths
from medusa_chat.trees.pick import Pick, pick

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
    """Step costs of one place. parameters: of the backbone, to know another model of that name.

    measured: tokens a second by drafter, end to end, where `bench` has run. date: ISO, in UTC.
    chosen: what followed from it when it was written, and why (`reason`).
    """

    place: TuningKey
    parameters: int
    costs: StepCosts
    date: str
    measured: dict[str, float] = field(default_factory=dict)
    chosen: str = ""

    def pick(self, tree: Tree, accuracies: Accuracies, long: bool = False) -> Pick:
        """How many of the tree's first nodes pay best behind the short or the long text."""
        length = self.costs.lengths[-1 if long else 0]
        return pick(self.costs, expected_lengths(tree, accuracies), length)

    def pays_below(self, nodes: int, tree: Tree, accuracies: Accuracies) -> bool:
        """Whether some size under `nodes`, measured or between what was, should pay behind the
        short text."""
        expected, length = expected_lengths(tree, accuracies), self.costs.lengths[0]
        sizes = range(2, min(self.costs.sizes[-1], nodes, len(expected)))
        return any(expected[m - 1] > self.costs.overhead(m, length) for m in sizes)

    def budget(
        self, tree: Tree, accuracies: Accuracies, candidates: Tree | None = None
    ) -> DraftBudget:
        """What decides, step by step, how much of `tree`, or which candidates, are drafted."""
        return DraftBudget(self.costs, expected_lengths(tree, accuracies), candidates)

    def reason(self, tree: Tree, accuracies: Accuracies) -> str:
        """The choice and its reason, in words; says if something else is faster."""
        best = self.pick(tree, accuracies)
        if best.nodes == 1:
            text = self._against(tree, accuracies)
        else:
            text = (
                f"{best.nodes} nodes: {best.tokens:.2f} expected tokens per step at "
                f"{best.overhead:.2f} times the cost, {best.speedup:.2f} times plain decoding, "
                f"by step times measured on this device on {self.date[:10]}"
            )
            text += self._beyond(best, self.pick(tree, accuracies, long=True))
        return text + self._bench()

    def summary(self) -> str:
        """The choice and the costs in one line, for the models nobody has loaded now."""
        length = self.costs.lengths[0]
        costs = ", ".join(f"{self.costs.overhead(m, length):.2f} at {m}" for m in self.costs.sizes)
        chosen = self.chosen or "no choice was made"
        return f"{chosen}; a step's time over a plain one's by nodes: {costs}"

    def _against(self, tree: Tree, accuracies: Accuracies) -> str:
        """Why plain decoding was picked."""
        expected, length = expected_lengths(tree, accuracies), self.costs.lengths[0]
        others = [m for m in self.costs.sizes if 1 < m <= len(expected)]
        text = f"plain decoding is faster than Medusa here (measured on {self.date[:10]})"
        if not others:
            return f"{text}: every draft costs more than it saves"
        speed = {m: expected[m - 1] / self.costs.overhead(m, length) for m in others}
        nodes = max(others, key=lambda m: speed[m])
        return f"{text}: the best draft, {nodes} nodes, would reach {speed[nodes]:.2f} of its speed"

    def _beyond(self, short: Pick, long: Pick) -> str:
        if long.nodes == short.nodes or len(self.costs.lengths) == 1:
            return ""
        size = "plain decoding" if long.nodes == 1 else f"{long.nodes} nodes"
        return f"; {size} at {self.costs.lengths[-1]:,} tokens"

    def _bench(self) -> str:
        """The method that `bench` found faster than Medusa, end to end."""
        own = self.measured.get("medusa")
        names = {"plain": "plain decoding", "prompt-lookup": "prompt-lookup"}
        found = {n: v for n, v in self.measured.items() if n in names and own and v > own}
        if not found:
            return ""
        name = max(found, key=lambda n: found[n])
        return (
            f"; bench found {names[name]} faster than Medusa here "
            f"({found[name]:.0f} against {own:.0f} tokens/s)"
        )


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
            measured={str(k): float(v) for k, v in values["measured"].items()},
            chosen=str(values["chosen"]),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
