"""Outcome: what a step came to, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance
from medusa_chat.decoding.drafters import Draft, Plan
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree


@dataclass
class Outcome:
    """One step's result. tokens: of every node of the draft. heads_seconds, backbone_seconds: what
    proposing it and the pass over it took, LM head included. certainty: the backbone's probability
    of next_token, 0 for anything under the plan's `least`; 1 where nobody asked."""

    path: list[int]
    tokens: list[int]
    next_token: int
    is_finite: bool
    record: DraftRecord | None
    heads_seconds: float = 0.0
    backbone_seconds: float = 0.0
    certainty: float = 1.0


class WholeStep(Protocol):
    """Does a step at once where it can, for plans and rules it knows; the cache is extended."""

    hidden: Tensor  # [1, d], the state after the last node that a step accepted
    seconds: float  # of all steps so far, without what Python does around them
    threads: int  # that work together

    def take(
        self,
        plan: Plan,
        root: int,
        hidden: Tensor,
        settings: GenerationSettings,
        details: bool,
    ) -> Outcome | None:
        """The step behind what the cache holds, as its parts would give it; None for what is
        theirs to do. hidden [1, d]: the state that gave the root."""
        ...

    def read(
        self, tokens: Sequence[int], settings: GenerationSettings, least: float
    ) -> Outcome | None:
        """One pass over the next tokens of the text, which the cache holds then, and what comes
        after them; None where that is its parts' to do. least: see Plan."""
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
        made = record(
            draft.tree, tokens, sampled, rows[0], rows[1], threshold, shares, draft.guesses
        )
    return Outcome(values[3 : 3 + length], tokens, next_token, bool(is_finite), made)


def record(
    tree: Tree,
    tokens: list[int],
    sampled: list[int],
    probabilities: list[float],
    entropies: list[float],
    thresholds: list[float] | None,
    shares: list[float] | None,
    guesses: tuple[tuple[int, ...], ...] = (),
) -> DraftRecord:
    """The draft as the trace holds it; what the root has no figure for is None."""
    n = len(tokens)
    return DraftRecord(
        tokens=tuple(tokens),
        parents=tree.parents,
        ranks=(None, *tree.ranks[1:]),
        draft_probabilities=(None, *shares[1:]) if shares else (None,) * n,
        probabilities=(None, *probabilities[1:]),
        entropies=tuple(entropies),
        thresholds=tuple(thresholds) if thresholds else (None,) * n,
        sampled=tuple(sampled),
        guesses=guesses,
    )
