"""AcceptanceCounts: how often each head was right in the user's own chats.

Counts only, never a text or a token. Which counts are unbiased: a step's record names the tokens
that each head drafted, rank by rank, and the answer itself says what came there. So a rank is
*asked* whenever the tree had it anywhere at its depth, whether or not the node above it was
accepted, and *right* where it names the token that came; nothing depends on what was accepted.
Only answers that are the backbone's own are counted (exact acceptance, or greedy): under typical
acceptance the draft chooses what comes. Ranks that the tree did not draft are never asked: for
them the stored calibration stands. Where only what the heads are sure of is drafted, every eighth
step asks all of them whatever they say, and that one is counted.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from medusa_chat.decoding.accept_length import Accuracies
from medusa_chat.decoding.dynamic_tree import ASKED_EVERY
from medusa_chat.decoding.events import DraftRecord, Prefilled, Step
from medusa_chat.decoding.tree import Choice

RANKS = 10  # of each head are looked at
MOST_PATHS = 3000  # of one fold that are kept, the most asked ones
MOST_STEPS = 20_000  # then every count is halved: what was said lately weighs more
HEAD_WEIGHT = 50  # the stored calibration counts as so many askings of a rank
GREEDY = 1e-3  # a temperature below it is none

Count = list[int]  # [right, asked]


@dataclass
class AcceptanceFold:
    """Counts of half of the answers. ranks[k, i]: head k's prediction i, alone, from 0.

    paths[c]: how often the path c was what came, and how often its last rank was drafted where
    the rest of it was what came.
    """

    ranks: dict[Choice, Count] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    paths: dict[Choice, Count] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    steps: int = 0

    def count(self, drafted: Sequence[Mapping[int, int]], came: Sequence[int]) -> None:
        """One step. drafted[k]: token -> rank of head k; came: the tokens after its root."""
        path: Choice | None = ()
        self.steps += 1
        for head, (ranks, token) in enumerate(zip(drafted, came, strict=False)):
            right = ranks.get(token)
            for rank in ranks.values():
                _add(self.ranks[head, rank], rank == right)
                if path is not None:
                    _add(self.paths[*path, rank], rank == right)
            path = None if path is None or right is None else (*path, right)

    def table(self, prior: Accuracies) -> list[list[float]]:
        """a[k][i]: (right + HEAD_WEIGHT * prior) / (asked + HEAD_WEIGHT), rows adding up to 1 at
        most: the share that was counted, drawn towards the stored one while there is little."""
        return [
            _at_most_one([drawn(self.ranks.get((k, i)), a, HEAD_WEIGHT) for i, a in enumerate(r)])
            for k, r in enumerate(prior)
        ]

    def halve(self) -> None:
        """Forget half of everything."""
        self.steps //= 2
        for counts in (self.ranks, self.paths):
            for name, (right, asked) in list(counts.items()):
                counts[name] = [right // 2, asked // 2]

    def plus(self, other: "AcceptanceFold") -> "AcceptanceFold":
        """Both together."""
        both = AcceptanceFold(steps=self.steps + other.steps)
        for fold in (self, other):
            for name in ("ranks", "paths"):
                into = getattr(both, name)
                for key, (right, asked) in getattr(fold, name).items():
                    into[key] = [into[key][0] + right, into[key][1] + asked]
        return both

    def to_json(self) -> dict[str, Any]:
        most = sorted(self.paths.items(), key=lambda item: (-item[1][1], item[0]))[:MOST_PATHS]
        return {
            "steps": self.steps,
            "ranks": {_name(key): count for key, count in sorted(self.ranks.items())},
            "paths": {_name(key): count for key, count in sorted(most) if count[1]},
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises ValueError, KeyError, TypeError or AttributeError for what is none."""
        fold = cls(steps=_whole(values["steps"]))
        for name in ("ranks", "paths"):
            for key, (right, asked) in values[name].items():
                if not 0 <= _whole(right) <= _whole(asked):
                    raise ValueError(f"{name} {key}: {right} of {asked}")
                choice = tuple(_whole(int(part)) for part in key.split("."))
                if max(choice) >= MOST_PATHS or (name == "ranks" and len(choice) != 2):
                    raise ValueError(f"{name} {key}")
                getattr(fold, name)[choice] = [right, asked]
        return fold


@dataclass
class AcceptanceCounts:
    """Everything counted for one model's heads. folds: of every other answer, so that a tree
    searched in one can be judged by the other. by_nodes: [steps, tokens] of trees by their size."""

    folds: tuple[AcceptanceFold, AcceptanceFold] = field(
        default_factory=lambda: (AcceptanceFold(), AcceptanceFold())
    )
    by_nodes: dict[int, Count] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    answers: int = 0

    @property
    def steps(self) -> int:
        return self.folds[0].steps + self.folds[1].steps

    @property
    def whole(self) -> AcceptanceFold:
        return self.folds[0].plus(self.folds[1])

    def take(self, first: Prefilled, steps: Sequence[Step], heads: int) -> bool:
        """Count one answer; False where nothing of it may be counted."""
        if not is_counted(first):
            return False
        fold, before = self.folds[self.answers % 2], self.steps
        for step, came in _followed(steps):
            if step.draft is not None and (len(step.draft.tokens) > 1 or step.draft.guesses):
                if step.draft.guesses and (step.index + 1) % ASKED_EVERY:
                    continue  # asked because something was sure
                fold.count(drafted(step.draft, heads), came)
                if step.draft.guesses:
                    continue  # large where the heads were sure: that is no measure of its size
                size = self.by_nodes[len(step.draft.tokens)]
                self.by_nodes[len(step.draft.tokens)] = [size[0] + 1, size[1] + len(step.token_ids)]
        if self.steps == before:
            return False
        self.answers += 1
        if self.steps > MOST_STEPS:
            self._halve()
        return True

    def _halve(self) -> None:
        for fold in self.folds:
            fold.halve()
        for nodes, (steps, tokens) in list(self.by_nodes.items()):
            self.by_nodes[nodes] = [steps // 2, tokens // 2]

    def to_json(self) -> dict[str, Any]:
        return {
            "answers": self.answers,
            "folds": [fold.to_json() for fold in self.folds],
            "by_nodes": {str(n): count for n, count in sorted(self.by_nodes.items()) if count[0]},
        }

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Raises ValueError, KeyError, TypeError or AttributeError for what is none."""
        first, second = (AcceptanceFold.from_json(fold) for fold in values["folds"])
        tally = cls(folds=(first, second), answers=_whole(values["answers"]))
        for nodes, (steps, tokens) in values["by_nodes"].items():
            tally.by_nodes[int(nodes)] = [_whole(steps), _whole(tokens)]
        return tally


def is_counted(first: Prefilled) -> bool:
    """Whether an answer with heads is the backbone's own, whatever was drafted."""
    settings = first.settings
    temperature = settings.get("temperature")
    is_greedy = isinstance(temperature, (int, float)) and temperature < GREEDY
    return settings.get("drafter") == "medusa" and (
        is_greedy or settings.get("acceptance") == "exact"
    )


def drafted(draft: DraftRecord, heads: int) -> list[dict[int, int]]:
    """For each head that took part: token -> its rank, as far as the tree had it; all that the
    head guessed where only what it was sure of was drafted, which would be right too often."""
    if draft.guesses:
        return [{t: rank for rank, t in enumerate(row[:RANKS])} for row in draft.guesses[:heads]]
    depths = [0]
    found: list[dict[int, int]] = []
    for node, parent in enumerate(draft.parents[1:], start=1):
        depths.append(depths[parent] + 1)
        rank = draft.ranks[node]
        if rank is not None and rank < RANKS and depths[node] <= heads:
            while len(found) < depths[node]:
                found.append({})
            found[depths[node] - 1][draft.tokens[node]] = rank
    return found


def _followed(steps: Sequence[Step]) -> Iterator[tuple[Step, list[int]]]:
    """Each step with the tokens that came after its root, as far as the answer goes."""
    tokens = [token for step in steps for token in step.token_ids]
    place = 0
    for step in steps:
        yield step, tokens[place : place + 16]
        place += len(step.token_ids)


def _add(count: Count, is_right: bool) -> None:
    count[0] += is_right
    count[1] += 1


def drawn(count: Count | None, towards: float, weight: int) -> float:
    """(right + weight * towards) / (asked + weight): the share that was counted, drawn towards
    another while there is little."""
    right, asked = count or (0, 0)
    return (right + weight * towards) / (asked + weight)


def _at_most_one(row: list[float]) -> list[float]:
    total = max(1.0, sum(row))
    return [share / total for share in row]


def _name(choice: Choice) -> str:
    return ".".join(map(str, choice))


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
