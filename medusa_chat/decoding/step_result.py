"""StepResult: what a step came to, on the host."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance, Rule
from medusa_chat.decoding.drafters import Draft, Drafter, Plan
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree


@dataclass
class StepResult:
    """One step's result. path: the nodes that stood, the root first; tokens: theirs. nodes: of the
    draft. heads_seconds, backbone_seconds: what proposing it and the pass over it took, LM head
    included; seconds: of all, but for what the host does around it. certainty: the backbone's, of
    next_token (acceptance.py), 0 for anything under the plan's `least` and where nobody asked."""

    path: list[int]
    tokens: list[int]
    next_token: int
    is_finite: bool
    nodes: int = 1
    record: DraftRecord | None = None
    heads_seconds: float = 0.0
    backbone_seconds: float = 0.0
    seconds: float = 0.0
    certainty: float = 0.0


@dataclass
class DecodeState:
    """How an answer is decoded, and where it is: hidden [1, d], the backbone's state that gave the
    root; root int64 [1], the root on the device, None where only the host has it; certainty: see
    Drafter.plan; most: tokens that are still wanted; ends: those behind which none is."""

    drafter: Drafter
    rule: Rule
    settings: GenerationSettings
    details: bool
    hidden: Tensor
    root: Tensor | None = None
    certainty: float = 0.0
    most: int = 1
    ends: tuple[int, ...] = ()


class WholeStep(Protocol):
    """Does steps at once where it can, for plans and rules it knows; the cache is extended."""

    hidden: Tensor  # [1, d], the state after the last node that a step accepted
    seconds: float  # of all steps so far, without what Python does around them
    threads: int  # that work together; 0: a device's
    tries: int  # steps of one kind that go before those which are as they will be

    def take(self, plan: Plan, root: int, here: DecodeState) -> list[StepResult] | None:
        """The step behind what the cache holds, as its parts would give it, and where the plan
        lasts and no details are wanted maybe those after it, for a moment; None for what is the
        parts' to do. A grower has booked them."""
        ...

    def read(
        self, tokens: Sequence[int], settings: GenerationSettings, least: float
    ) -> StepResult | None:
        """One pass over the next tokens of the text, which the cache holds then, and what comes
        after them; None where that is its parts' to do. least: see Plan."""
        ...


@dataclass(frozen=True)
class Frame:
    """How to read `packed` words: the draft's tree and guesses, the longest path, and which rows
    of figures there are."""

    tree: Tree
    longest: int
    has_details: bool = False
    has_thresholds: bool = False
    has_shares: bool = False
    guesses: tuple[tuple[int, ...], ...] = ()


def read(draft: Draft, accepted: Acceptance) -> StepResult:
    """The step's one copy to the host."""
    words, frame = packed(draft, accepted)
    return unpacked(words.cpu(), frame)


def packed(draft: Draft, accepted: Acceptance) -> tuple[Tensor, Frame]:
    """All that the host wants to know of a step as one row of words on the device: int64, or with
    figures int32, whose last ones are those of floats."""
    whole = [
        accepted.length.view(1),
        accepted.next_token,
        accepted.is_finite.view(1),
        accepted.path,
        draft.tokens,
    ]
    found = accepted.details
    if found is None:
        return torch.cat(whole), Frame(draft.tree, len(accepted.path))
    whole.append(found.sampled)
    figures = [found.probabilities, found.entropies]
    figures += [t for t in (found.thresholds, draft.probabilities) if t is not None]
    bits = torch.cat(figures).float().view(torch.int32)
    frame = Frame(
        draft.tree,
        len(accepted.path),
        True,
        found.thresholds is not None,
        draft.probabilities is not None,
        draft.guesses,
    )
    return torch.cat((torch.cat(whole).to(torch.int32), bits)), frame


def unpacked(host: Tensor, frame: Frame) -> StepResult:
    """The outcome that `packed` words on the host stand for."""
    values = host.tolist()
    length, next_token, is_finite = values[:3]
    n, deep = len(frame.tree), 3 + frame.longest
    tokens = values[deep : deep + n]
    made = None
    if frame.has_details:
        sampled = values[deep + n : deep + 2 * n]
        rows = host[deep + 2 * n :].view(torch.float32).view(-1, n).tolist()
        threshold = rows.pop(2) if frame.has_thresholds else None
        shares = rows.pop(2) if frame.has_shares else None
        made = record(
            frame.tree, tokens, sampled, rows[0], rows[1], threshold, shares, frame.guesses
        )
    path = values[3 : 3 + length]
    return StepResult(path, [tokens[i] for i in path], next_token, bool(is_finite), n, made)


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
