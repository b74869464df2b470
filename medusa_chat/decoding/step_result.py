"""StepResult: the result of a step on the host; AnswerTokens, what steps brought so far."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance
from medusa_chat.decoding.drafters import Draft
from medusa_chat.decoding.events import DraftRecord, Finished, Reason, Source, Stats, Step
from medusa_chat.decoding.tree import Tree

BROKEN = (
    "the model produced invalid numbers (NaN or infinity): try --precision fp32, or check its "
    "weights"
)


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


@dataclass(frozen=True)
class Frame:
    """The layout of `packed` words: the draft's tree, the longest path's nodes, the names of the
    rows of figures, and the draft's guesses and sources."""

    tree: Tree
    longest: int
    figures: tuple[str, ...] = ()
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()


def read(draft: Draft, accepted: Acceptance) -> StepResult:
    """A step's result on the host, by its one copy from the device."""
    words, frame = packed(draft, accepted)
    return unpacked(words.cpu(), frame)


def packed(draft: Draft, accepted: Acceptance) -> tuple[Tensor, Frame]:
    """A step's result as one row of words on the device, and how to read it: int64 [3 + longest +
    n], or with figures int32, the last rows of which are the bits of float32 [n] each."""
    counts = accepted.length.view(1), accepted.next_token, accepted.is_finite.view(1)
    whole, found = [*counts, accepted.path, draft.tokens], accepted.details
    if found is None:
        return torch.cat(whole), Frame(draft.tree, len(accepted.path))
    whole.append(found.sampled)
    figures = {
        "probabilities": found.probabilities,
        "entropies": found.entropies,
        "thresholds": found.thresholds,
        "shares": draft.probabilities,
    }
    rows = {name: row for name, row in figures.items() if row is not None}
    bits = torch.cat(list(rows.values())).float().view(torch.int32)
    frame = Frame(draft.tree, len(accepted.path), tuple(rows), draft.guesses, draft.sources)
    return torch.cat((torch.cat(whole).to(torch.int32), bits)), frame


def unpacked(host: Tensor, frame: Frame) -> StepResult:
    """The result in `packed` words, int32 [w], that were copied to the host."""
    values = host.tolist()
    length, next_token, is_finite = values[:3]
    n, deep = len(frame.tree.parents), 3 + frame.longest
    path, tokens = values[3 : 3 + length], values[deep : deep + n]
    record = None
    if frame.figures:
        rows = host[deep + 2 * n :].view(torch.float32).view(-1, n).tolist()
        figures = dict(zip(frame.figures, rows, strict=True))
        record = _record(frame, tokens, values[deep + n : deep + 2 * n], figures)
    return StepResult(path, [tokens[i] for i in path], next_token, bool(is_finite), n, record)


def _record(
    frame: Frame, tokens: list[int], sampled: list[int], figures: dict[str, list[float]]
) -> DraftRecord:
    """The draft as a trace holds it; figures that the root does not have are None, and those of
    the heads at nodes that only the text proposed."""
    nothing = (None,) * len(tokens)
    sources = frame.sources or ("heads",) * len(tokens)
    is_own = [node > 0 and source != "text" for node, source in enumerate(sources)]
    shares = zip(figures.get("shares", nothing), is_own, strict=True)
    ranks = zip(frame.tree.ranks, is_own, strict=True)
    return DraftRecord(
        tokens=tuple(tokens),
        parents=frame.tree.parents,
        ranks=tuple(rank if own else None for rank, own in ranks),
        draft_probabilities=tuple(share if own else None for share, own in shares),
        probabilities=(None, *figures["probabilities"][1:]),
        entropies=tuple(figures["entropies"]),
        thresholds=tuple(figures.get("thresholds", nothing)),
        sampled=tuple(sampled),
        guesses=frame.guesses,
        sources=frame.sources,
    )


class AnswerTokens:
    """What was emitted so far. reason: why the answer has ended; None while it goes on.

    eos: ids that end it, which are not emitted; limit: the most tokens, at which it ends for the
    reason `at_limit`.
    """

    def __init__(self, eos: frozenset[int], limit: int, at_limit: Reason) -> None:
        self.eos, self.limit, self.at_limit = eos, limit, at_limit
        self.ids: list[int] = []
        self.reason: Reason | None = None
        self.prefill_seconds = 0.0
        self._steps, self._emitted, self._seconds = 0, 0, 0.0

    @property
    def room(self) -> int:
        """The number of tokens that may still be added."""
        return self.limit - len(self.ids)

    def begin(self, result: StepResult, seconds: float) -> tuple[int, ...]:
        """The prompt was read in `seconds`; returns what is emitted of its first token."""
        self.prefill_seconds = seconds
        return tuple(self._add([result.next_token], result))

    def step(self, tokens: Sequence[int], result: StepResult, seconds: float, why: str) -> Step:
        """The event of a step that brought `tokens`. why: it drafted so many nodes."""
        fresh = self._add(tokens, result)
        count = len(fresh) + (self.reason == "eos")
        index = self._steps
        self._steps, self._emitted = index + 1, self._emitted + count
        self._seconds += seconds
        return Step(
            index,
            tuple(fresh),
            "",
            seconds,
            tuple(result.path[: count + 1]),
            result.record,
            result.heads_seconds,
            result.backbone_seconds,
            result.nodes,
            why,
        )

    def finished(self) -> Finished:
        """The last event. It has ended."""
        assert self.reason is not None
        timing = (self._steps, self._emitted, self._seconds, self.prefill_seconds)
        return Finished(
            reason=self.reason,
            token_ids=tuple(self.ids),
            text="",
            tail="",
            stats=Stats.of(len(self.ids), *timing),
            message=BROKEN if self.reason == "error" else "",
        )

    def _add(self, tokens: Sequence[int], result: StepResult) -> list[int]:
        """The tokens of a step that are emitted, up to an end token or a limit."""
        if not result.is_finite:
            self.reason = "error"
            return []
        fresh: list[int] = []
        for token in tokens:
            if token in self.eos:
                self.reason = "eos"
                break
            fresh.append(token)
            if len(fresh) >= self.room:
                self.reason = self.at_limit
                break
        self.ids += fresh
        return fresh
