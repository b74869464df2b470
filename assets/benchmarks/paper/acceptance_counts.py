"""AcceptanceCounts: how often each head was right in the answers of a study.

The counts are unbiased: the record of a step names the
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

from medusa_chat.decoding.events import DraftRecord, Prefilled, Step
from medusa_chat.decoding.settings import GREEDY
from medusa_chat.trees.expected_length import Accuracies

RANKS = 10  # of each head that are counted
WEIGHT = 50  # the stored calibration counts as so many askings of a rank


@dataclass
class AcceptanceCounts:
    """All counts for the heads of one model. ranks[k, i]: of head k's prediction i, both from 0,
    [right, asked]."""

    ranks: dict[tuple[int, int], list[int]] = field(
        default_factory=lambda: defaultdict(lambda: [0, 0])
    )
    steps: int = 0

    def add_answer(self, first: Prefilled, steps: Sequence[Step], heads: int) -> bool:
        """Count one answer; False where nothing of it may be counted."""
        if not is_counted(first):
            return False
        before = self.steps
        for step, following in _with_following(steps):
            self._add_step(step.draft, following, heads)
        if self.steps == before:
            return False
        return True

    def _add_step(self, draft: DraftRecord | None, following: Sequence[int], heads: int) -> None:
        """Count one step. following: the token ids that followed its root in the answer."""
        if draft is None or (len(draft.tokens) == 1 and not draft.guesses):
            return
        drafted = drafted_ranks(draft, heads)
        self.steps += bool(drafted)  # none where only the text drafted
        for head, (ranks, token) in enumerate(zip(drafted, following, strict=False)):
            for drafted_token, rank in ranks.items():
                count = self.ranks[head, rank]
                count[0] += drafted_token == token
                count[1] += 1

    def table(self, prior: Accuracies, unseen: float = 1.0) -> list[list[float]]:
        """Rank accuracies a[k][i] = (right + WEIGHT * prior) / (asked + WEIGHT): the counted share,
        smoothed by the prior, or the prior times `unseen` where a rank was never asked. Each row
        adds up to at most 1."""
        rows = [
            [self._share(k, i, a, unseen) for i, a in enumerate(r)] for k, r in enumerate(prior)
        ]
        return [[share / max(1.0, sum(row)) for share in row] for row in rows]

    def _share(self, head: int, rank: int, prior: float, unseen: float) -> float:
        right, asked = self.ranks.get((head, rank), (0, 0))
        return (right + WEIGHT * prior) / (asked + WEIGHT) if asked else prior * unseen


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
