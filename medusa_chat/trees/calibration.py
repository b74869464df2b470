"""Calibration: how often each prediction of the heads is right, and the best tree by that.

Two ways to the tree. Rank accuracies, multiplied along a path (Medusa, arXiv 2401.10774, 2.3.3),
leave out two things: the heads are right together more often than independent ones, and a step
begins where the draft of the step before was rejected, where prediction is harder. Whole answers
leave out neither: their paths are counted at the positions where the steps begin when they are
decoded with the tree of the last round. No torch.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.trees.expected_length import expected_lengths, likeliest

CALIBRATION_FILE = "medusa_calibration.json"
# what parsing JSON of another shape raises
MISSHAPEN = (ArithmeticError, LookupError, ValueError, TypeError, AttributeError, RecursionError)
TREE_NODES = 64  # of the tree that a training searches
USED_NODES = 16  # the first nodes, for which the tree is searched; larger trees extend it
SIZES = (1, 2, 4, 8, 16, 32, 64)  # at which tokens a step are predicted
ROUNDS = 6  # of the search by answers, at most

# For one position of an answer as the root: the rank (from 0) that head k gave to the token k + 1
# positions later; None where that is not among its first predictions, or after the answer's end.
Ranks = Sequence[int | None]
AnswerRanks = Sequence[Ranks]


@dataclass(frozen=True)
class Calibration:
    """Rank accuracies a[k][i], how often head k's (i+1)-th prediction is right, and the nodes of
    the best tree as the reference writes them (choices), in order of value.

    measured_on, positions: what was measured, and how many labels the first head had. rates: nodes
    -> tokens a step that the measured answers would have had with the tree, where it was searched
    on answers. shortlist: ids of the tokens that the heads may draft; empty: all.
    """

    accuracies: tuple[tuple[float, ...], ...]
    choices: tuple[Choice, ...]
    measured_on: str = ""
    positions: int = 0
    rates: Mapping[int, float] = field(default_factory=dict)
    shortlist: tuple[int, ...] = ()

    @classmethod
    def search(
        cls,
        accuracies: Sequence[Sequence[float]],
        nodes: int,
        measured_on: str,
        positions: int,
        answers: Sequence[AnswerRanks] = (),
    ) -> "Calibration":
        """The calibration with the best tree of at most `nodes` nodes: by the paths of whole
        answers where there are any, otherwise by products of accuracies. Raises UsageError."""
        table = tuple(tuple(round(a, 5) for a in row) for row in accuracies)
        if not answers:
            return cls(table, likeliest(table, nodes).choices[1:], measured_on, positions)
        tree = search_paths(answers, nodes, min(nodes, USED_NODES))
        rates = {n: round(tokens_per_step(answers, tree.head(n)), 3) for n in _sizes(tree)}
        return cls(table, tree.choices[1:], measured_on, positions, rates)

    @cached_property
    def tree(self) -> Tree:
        return Tree.from_choices(self.choices)

    @property
    def expected(self) -> dict[int, float]:
        """Nodes -> tokens a step for sizes up to the tree's: from the answers where it was searched
        on them, otherwise from the accuracies."""
        lengths = expected_lengths(self.tree, self.accuracies)
        return {n: lengths[n - 1] for n in _sizes(self.tree)} | dict(self.rates)

    def usable_shortlist(self, vocabulary: int) -> tuple[tuple[int, ...], list[str]]:
        """The shortlist for a backbone with this many tokens; empty where it is of no use there,
        and a sentence that says why."""
        if not all(0 <= token < vocabulary for token in self.shortlist):
            why = "it has tokens outside the vocabulary"
        elif 2 * len(self.shortlist) > vocabulary:
            why = "it covers over half of the vocabulary"
        else:
            return self.shortlist, []
        return (), [f"the calibration's shortlist is ignored: {why}"]

    def to_json(self) -> dict[str, Any]:
        """The content of CALIBRATION_FILE."""
        values: dict[str, Any] = {"version": 1, "accuracies": self.accuracies}
        values |= {"choices": self.choices, "measured_on": self.measured_on}
        values["positions"] = self.positions
        if self.rates:
            values["tokens_per_step"] = {str(n): rate for n, rate in self.rates.items()}
        if self.shortlist:
            values["shortlist"] = self.shortlist
        return values

    @classmethod
    def read(cls, file: Path) -> "Calibration":
        """Raises ModelError when the file is not a calibration."""
        try:
            text = file.read_bytes()
        except OSError as error:
            raise _invalid(file, error) from error
        return cls.parse(text, file)

    @classmethod
    def parse(cls, text: bytes, file: Path | str) -> "Calibration":
        """text: the content of `file`. Raises ModelError when that is not a calibration."""
        try:
            values = json.loads(text)
            tree = Tree.from_choices(values["choices"])
            rates = sorted((int(n), float(r)) for n, r in values.get("tokens_per_step", {}).items())
            return cls(
                tuple(tuple(map(_share, row)) for row in values["accuracies"]),
                tree.choices[1:],
                measured_on=str(values.get("measured_on", "")),
                positions=int(values.get("positions", 0)),
                rates=dict(rates),
                shortlist=_tokens(values.get("shortlist", [])),
            )
        except (*MISSHAPEN, UsageError) as error:
            raise _invalid(file, error) from error


def _share(value: Any) -> float:
    """A share from 0 to 1. Raises ValueError for anything else."""
    share = float(value)
    if not 0 <= share <= 1:
        raise ValueError(f"an accuracy is {value!r:.20}, not a number from 0 to 1")
    return share


def _tokens(listed: object) -> tuple[int, ...]:
    """Token ids, each once. Raises ValueError for anything else."""
    if not isinstance(listed, list) or any(type(token) is not int for token in listed):
        raise ValueError("its shortlist is not a list of token ids")
    return tuple(sorted(set(listed)))


def _invalid(file: Path | str, why: Exception) -> ModelError:
    return ModelError(
        f"{file} is not a valid calibration ({why}): delete it, or run medusa-chat calibrate"
    )


def _sizes(tree: Tree) -> list[int]:
    return sorted({*(n for n in SIZES if n < len(tree)), len(tree)})


# ------------------------------------------------------------------------ the search by answers


def search_paths(answers: Sequence[AnswerRanks], nodes: int, used: int) -> Tree:
    """The tree of at most `nodes` nodes whose first `used` give these answers the most tokens a
    step. Nodes are in order of how often they were right, so the first m of them are a tree.

    Raises UsageError for answers in which no head was right.
    """
    roots = [ranks for answer in answers for ranks in answer]
    best, most = Tree.from_choices([]), 0.0
    for _ in range(ROUNDS):
        tree = _most_frequent(roots, nodes)
        roots = [
            answer[place] for answer in answers for place in step_positions(answer, tree.head(used))
        ]
        rate = tokens_per_step(answers, tree.head(used))
        if rate <= most:
            break
        best, most = tree, rate
    if len(best) < min(used, 2):
        raise UsageError("the heads predicted no token of the answers: there is no tree to search")
    return best


def _most_frequent(roots: Sequence[Ranks], nodes: int) -> Tree:
    """The tree of the most frequent paths. No path is more frequent than its parent, so the first
    ones are a tree."""
    counts = Counter(path for ranks in roots for path in _paths(ranks))
    order = sorted(counts.items(), key=lambda item: (-item[1], len(item[0]), item[0]))
    return Tree.from_choices([path for path, _ in order[: nodes - 1]])


def _paths(ranks: Ranks) -> Iterator[Choice]:
    """Every path that would have been accepted from this root, the shortest first."""
    path: tuple[int, ...] = ()
    for rank in ranks:
        if rank is None:
            return
        path = (*path, rank)
        yield path


def step_positions(answer: AnswerRanks, tree: Tree) -> Iterator[int]:
    """The positions at which the steps begin when the answer is decoded with this tree."""
    paths, place = set(tree.choices), 0
    while place < len(answer) - 1:
        yield place
        place += 1 + max((len(p) for p in _paths(answer[place]) if p in paths), default=0)


def tokens_per_step(answers: Sequence[AnswerRanks], tree: Tree) -> float:
    """The acceleration rate of the tree on these answers, without the first token of each, which
    the prefill gives."""
    steps = sum(1 for answer in answers for _ in step_positions(answer, tree))
    tokens = sum(max(len(answer) - 1, 0) for answer in answers)
    return tokens / steps if steps else 0.0
