"""StepResult: the result of a step on the host; DecodeState and StepBackend beside it."""

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance, Rule
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters import Draft, Drafter, Plan
from medusa_chat.decoding.events import DraftRecord, Source
from medusa_chat.decoding.sampling import Rows
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree

Number = TypeVar("Number", int, float)


@dataclass
class StepResult:
    """The result of one step. path: the accepted nodes, the root first; tokens: theirs; nodes: of
    the draft. heads_seconds: time of drafting; backbone_seconds: of the pass, LM head included."""

    path: list[int]
    tokens: list[int]
    next_token: int
    is_finite: bool
    nodes: int = 1
    record: DraftRecord | None = None
    heads_seconds: float = 0.0
    backbone_seconds: float = 0.0


@dataclass
class DecodeState:
    """How an answer is decoded, and its current position, which every step moves on. root_id: the
    root; root int64 [1]: the same on the device, None where only the host has it; hidden [1, d]:
    the backbone's state from which it was predicted; most: tokens still to generate."""

    drafter: Drafter
    rule: Rule
    settings: GenerationSettings
    details: bool
    hidden: Tensor
    root_id: int
    root: Tensor | None = None
    most: int = 1


class StepBackend(Protocol):
    """Runs decoding steps on a backbone: chosen when a model is loaded, given to its engine."""

    backbone: Backbone
    name: str  # what a step is here, in a few words
    seconds: float  # of drafts and passes so far; what else a step takes is the host's
    tries: int  # steps of one kind before they run at full speed
    rows: Rows  # what reads logits

    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """One step: draft, pass, acceptance. Accepted rows are in the cache afterwards, and `state`
        describes the position after them."""
        ...


@dataclass(frozen=True)
class Frame:
    """The layout of `packed` words: the draft's tree, guesses and sources, the longest path's
    nodes, and which rows of figures there are."""

    tree: Tree
    longest: int
    has_details: bool = False
    has_thresholds: bool = False
    has_shares: bool = False
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()


def read(draft: Draft, accepted: Acceptance) -> StepResult:
    """A step's result on the host, by its one copy from the device."""
    words, frame = packed(draft, accepted)
    return unpacked(words.cpu(), frame)


def packed(draft: Draft, accepted: Acceptance) -> tuple[Tensor, Frame]:
    """A step's result as one row of words on the device, and how to read it: int64 [3 + longest +
    n], or with figures int32, the last rows of which are the bits of float32 [n] each."""
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
        draft.sources,
    )
    return torch.cat((torch.cat(whole).to(torch.int32), bits)), frame


def unpacked(host: Tensor, frame: Frame) -> StepResult:
    """The result in `packed` words, int32 [w], that were copied to the host."""
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
            *(frame.tree, tokens, sampled, rows[0], rows[1], threshold, shares),
            *(frame.guesses, frame.sources),
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
    sources: tuple[Source | None, ...] = (),
) -> DraftRecord:
    """The draft as a trace holds it; figures that the root does not have are None, and those of
    the heads at nodes that only the text proposed."""
    n = len(tokens)
    ranks: tuple[int | None, ...] = (None, *tree.ranks[1:])
    drafted: tuple[float | None, ...] = (None, *shares[1:]) if shares else (None,) * n
    if sources:
        ranks, drafted = _of_heads(ranks, sources), _of_heads(drafted, sources)
    return DraftRecord(
        tokens=tuple(tokens),
        parents=tree.parents,
        ranks=ranks,
        draft_probabilities=drafted,
        probabilities=(None, *probabilities[1:]),
        entropies=tuple(entropies),
        thresholds=tuple(thresholds) if thresholds else (None,) * n,
        sampled=tuple(sampled),
        guesses=guesses,
        sources=sources,
    )


def _of_heads(
    values: tuple[Number | None, ...], sources: tuple[Source | None, ...]
) -> tuple[Number | None, ...]:
    """The values of the nodes that the heads proposed, else None."""
    pairs = zip(values, sources, strict=True)
    return tuple(value if source in ("heads", "both") else None for value, source in pairs)
