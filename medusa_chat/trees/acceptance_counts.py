"""AcceptanceCounts: how often each head was right in the user's own chats.

Only counts are kept, never a text or a token. They are unbiased: the record of a step names the
tokens that each head drafted, rank by rank, and the answer says which token followed. A rank counts
as *asked* whenever the tree had it anywhere at its depth, whether or not the node above it was
accepted, and as *right* where its token is the one that followed. Only answers that are the
backbone's own are counted (exact acceptance, or greedy): under typical acceptance the draft decides
the text. A rank that the tree did not draft is never asked: the stored calibration stands for it.
Dynamic trees draft only what the heads are sure of, which would be right too often; of those, all
that each head guessed is counted, whether it was drafted or not.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from medusa_chat.decoding.events import DraftRecord, Prefilled, Step
from medusa_chat.decoding.settings import GREEDY
from medusa_chat.trees.acceptance_fold import AcceptanceFold, Count, whole_number

RANKS = 10  # of each head that are counted
MOST_STEPS = 20_000  # then every count is halved, so that recent chats weigh more


@dataclass
class AcceptanceCounts:
    """All counts for the heads of one model. folds: every other answer goes into each, so that a
    tree searched in one is judged by the other. by_nodes: nodes of a tree -> [steps, tokens]."""

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

    def add_answer(self, first: Prefilled, steps: Sequence[Step], heads: int) -> bool:
        """Count one answer; False where nothing of it may be counted."""
        if not is_counted(first):
            return False
        fold, before = self.folds[self.answers % 2], self.steps
        for step, following in _with_following(steps):
            self._add_step(fold, step, following, heads)
        if self.steps == before:
            return False
        self.answers += 1
        if self.steps > MOST_STEPS:
            self._halve()
        return True

    def _add_step(
        self, fold: AcceptanceFold, step: Step, following: Sequence[int], heads: int
    ) -> None:
        draft = step.draft
        if draft is None or (len(draft.tokens) == 1 and not draft.guesses):
            return
        ranks = drafted_ranks(draft, heads)
        if not ranks:  # only the text drafted
            return
        fold.count(ranks, following)
        if not draft.guesses and not draft.sources:  # a dynamic tree is large where heads are sure
            count = self.by_nodes[len(draft.tokens)]
            count[0] += 1
            count[1] += len(step.token_ids)

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
        """The counts in a JSON value. Raises ValueError, KeyError, TypeError or AttributeError."""
        first, second = (AcceptanceFold.from_json(fold) for fold in values["folds"])
        counts = cls(folds=(first, second), answers=whole_number(values["answers"]))
        for nodes, (steps, tokens) in values["by_nodes"].items():
            counts.by_nodes[int(nodes)] = [whole_number(steps), whole_number(tokens)]
        return counts


def is_counted(first: Prefilled) -> bool:
    """Whether the heads drafted an answer and its text is the backbone's own choice."""
    settings = first.settings
    temperature = settings.get("temperature")
    is_greedy = isinstance(temperature, (int, float)) and temperature < GREEDY
    return settings.get("drafter") in ("auto", "medusa") and (
        is_greedy or settings.get("acceptance") == "exact"
    )


def drafted_ranks(draft: DraftRecord, heads: int) -> list[dict[int, int]]:
    """For each head: token id -> rank of those that the tree had at its depth; for a dynamic tree,
    of all that the head predicted."""
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


def _with_following(steps: Sequence[Step]) -> Iterator[tuple[Step, list[int]]]:
    """Each step with the token ids that follow its root in the answer, 16 at most."""
    tokens = [token for step in steps for token in step.token_ids]
    place = 0
    for step in steps:
        yield step, tokens[place : place + 16]
        place += len(step.token_ids)
