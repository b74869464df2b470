"""Outcome: what a step came to, on the host."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance, Position
from medusa_chat.decoding.drafters import Draft
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.settings import GenerationSettings


@dataclass(frozen=True)
class Outcome:
    """One step's result, in the order it was packed on the device. tokens: of every node."""

    path: list[int]
    tokens: list[int]
    next_token: int
    is_finite: bool
    record: DraftRecord | None


class Referee(Protocol):
    """Decides a whole step at once, for rules it knows; see acceptance.py for what they are."""

    def decide(
        self,
        draft: Draft,
        logits: Tensor,
        position: Position,
        settings: GenerationSettings,
        details: bool,
    ) -> Outcome | None:
        """The step's outcome by `settings`' rule, as that rule and `read` would give it; None for
        what is theirs to decide."""
        ...


def read(draft: Draft, accepted: Acceptance) -> Outcome:
    """The step's one copy to the host."""
    whole = [
        accepted.length.view(1),
        accepted.next_token,
        accepted.is_finite.view(1),
        accepted.path,
        draft.tokens,
    ]
    found = accepted.details
    figures: list[Tensor] = []
    if found is not None:
        whole.append(found.sampled)
        figures = [found.probabilities, found.entropies]
        figures += [t for t in (found.thresholds, draft.probabilities) if t is not None]
    words = torch.cat(whole)
    if figures:
        bits = torch.cat(figures).float().view(torch.int32)
        words = torch.cat((words.to(torch.int32), bits))
    host = words.cpu()
    values = host.tolist()
    length, next_token, is_finite = values[:3]
    n, deep = len(draft.tree), 3 + len(accepted.path)
    tokens = values[deep : deep + n]
    made = None
    if found is not None:
        sampled = values[deep + n : deep + 2 * n]
        rows = host[deep + 2 * n :].view(torch.float32).view(-1, n).tolist()
        threshold = rows.pop(2) if found.thresholds is not None else None
        shares = rows.pop(2) if draft.probabilities is not None else None
        made = record(draft, tokens, sampled, rows[0], rows[1], threshold, shares)
    return Outcome(values[3 : 3 + length], tokens, next_token, bool(is_finite), made)


def record(
    draft: Draft,
    tokens: list[int],
    sampled: list[int],
    probabilities: list[float],
    entropies: list[float],
    thresholds: list[float] | None,
    shares: list[float] | None,
) -> DraftRecord:
    """The draft as the trace holds it; what the root has no figure for is None."""
    n = len(tokens)
    return DraftRecord(
        tokens=tuple(tokens),
        parents=draft.tree.parents,
        ranks=(None, *draft.tree.ranks[1:]),
        draft_probabilities=(None, *shares[1:]) if shares else (None,) * n,
        probabilities=(None, *probabilities[1:]),
        entropies=tuple(entropies),
        thresholds=tuple(thresholds) if thresholds else (None,) * n,
        sampled=tuple(sampled),
    )
