"""The best tree of a checkpoint's heads, and Calibrated, which holds it with what was measured.

Two searches. Rank accuracies, multiplied along a path (Medusa, arXiv 2401.10774, 2.3.3), leave out
two things: the heads are right together more often than independent ones, and a step begins where
the draft of the step before was rejected, where prediction is harder. Whole answers leave out
neither: their paths are counted at the positions where the steps begin when they are decoded with
the tree of the last round. No torch.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from medusa_chat.decoding.settings import MAX_NODES
from medusa_chat.decoding.tree import Choice, Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.expected_length import Accuracies, expected_lengths, likeliest

TREE_NODES = 64
USED_NODES = 16  # the first nodes, for which the tree is searched; larger trees extend it
SIZES = (1, 2, 4, 8, 16, 32, 64)
ROUNDS = 6  # of the search by answers, at most
# For one position of an answer as the root: the rank (from 0) that head k gave to the token k + 1
# positions later; None where that is not among its first predictions, or after the answer's end.
Ranks = Sequence[int | None]
AnswerRanks = Sequence[Ranks]


@dataclass(frozen=True)
class Calibrated:
    """Rank accuracies a[k][i] of the heads, and the paths (choices) of the best tree. measured_on,
    positions: on what, and at how many labels of the first head. rates: nodes -> tokens a step that
    the answers would have had with the tree, where it was searched on answers. shortlist: ids of
    the tokens that the heads may draft; empty: all."""

    accuracies: tuple[tuple[float, ...], ...]
    choices: tuple[tuple[int, ...], ...]
    measured_on: str
    positions: int
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
    ) -> "Calibrated":
        """The calibration with the best tree of at most `nodes` nodes: by the paths of whole
        answers where there are any, otherwise by products of accuracies. Raises UsageError."""
        table = tuple(tuple(round(a, 5) for a in row) for row in accuracies)
        if not answers:
            return cls(table, search_tree(table, nodes).choices[1:], measured_on, positions)
        tree = search_paths(answers, nodes, min(nodes, USED_NODES))
        rates = {n: round(tokens_per_step(answers, tree.head(n)), 3) for n in _sizes(tree)}
        return cls(table, tree.choices[1:], measured_on, positions, rates)

    @property
    def tree(self) -> Tree:
        return Tree.from_choices(self.choices)

    @property
    def expected(self) -> dict[int, float]:
        """Nodes -> tokens a step for sizes up to the tree's: from the answers where it was searched
        on them, otherwise from the accuracies."""
        lengths = expected_lengths(self.tree, self.accuracies)
        return {n: lengths[n - 1] for n in _sizes(self.tree)} | dict(self.rates)

    def to_json(self) -> dict[str, Any]:
        """The content of medusa_calibration.json."""
        values: dict[str, Any] = {"version": 1, "accuracies": self.accuracies}
        values |= {"choices": self.choices, "measured_on": self.measured_on}
        values["positions"] = self.positions
        if self.rates:
            values["tokens_per_step"] = {str(n): rate for n, rate in self.rates.items()}
        if self.shortlist:
            values["shortlist"] = self.shortlist
        return values


def _sizes(tree: Tree) -> list[int]:
    return sorted({*(n for n in SIZES if n < len(tree)), len(tree)})


def search_tree(accuracies: Accuracies, nodes: int) -> Tree:
    """The tree of at most `nodes` nodes, the root counted, with the longest expected path.

    accuracies[k][i]: how often the (i+1)-th prediction of head k alone is right. The value of a
    node is the product of the accuracies along its path (Medusa, arXiv 2401.10774, 2.3.3), and the
    first m nodes are the best tree of m nodes. Raises UsageError for a table that is not one of
    accuracies, and for a number of nodes out of range.
    """
    _require_accuracies(accuracies)
    if not 1 <= nodes <= MAX_NODES:
        raise UsageError(f"nodes is {nodes}: give a whole number from 1 to {MAX_NODES}")
    return likeliest(accuracies, nodes)


def _require_accuracies(accuracies: Accuracies) -> None:
    for head, row in enumerate(accuracies):
        if any(not isfinite(a) or not 0 <= a <= 1 for a in row) or sum(row) > 1 + 1e-4:
            raise UsageError(
                f"the accuracies of head {head} are {list(row)!r:.60}: give numbers from 0 to 1 "
                "with a sum of at most 1"
            )


def search_paths(answers: Sequence[AnswerRanks], nodes: int, used: int) -> Tree:
    """The tree of at most `nodes` nodes whose first `used` give these answers the most tokens a
    step. Nodes are in order of how often they were right, so the first m of them are a tree.

    Raises UsageError for sizes out of range and for answers in which no head was right.
    """
    if not 1 <= used <= nodes <= MAX_NODES:
        raise UsageError(
            f"nodes is {nodes}, used {used}: nodes is at most {MAX_NODES}, used 1 to nodes"
        )
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
