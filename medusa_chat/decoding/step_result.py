"""StepResult: the result of a step on the host; AnswerTokens, what steps brought so far."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance
from medusa_chat.decoding.draft import Draft
from medusa_chat.decoding.events import DraftRecord, Finished, Reason, Stats, Step

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
    """How a step's words are to be read: its draft, and the names of the rows in `packed`."""

    draft: Draft
    names: tuple[str, ...]


def read(draft: Draft, accepted: Acceptance) -> StepResult:
    """A step's result on the host; it waits for the device once."""
    return unpacked(*packed(draft, accepted))


def packed(draft: Draft, accepted: Acceptance) -> tuple[Tensor, Frame]:
    """A step's result as one row of words on the device, float32 [1 + rows * n], and how to read
    it: the accepted node, then the tokens and the backbone's own, and of figures those that the
    host does not know yet. Token ids are below 2**24, so that a float32 holds them."""
    rows = {"tokens": draft.tokens, "sampled": accepted.sampled, "entropies": accepted.checks}
    if accepted.log_probabilities is not None:
        rows["log_probabilities"] = accepted.log_probabilities
        figures = {"thresholds": accepted.thresholds, "shares": draft.shares}
        rows |= {name: row for name, row in figures.items() if isinstance(row, Tensor)}
    words = torch.cat([row.float() for row in (accepted.node, *rows.values())])
    return words, Frame(draft, tuple(rows))


def unpacked(words: Tensor, frame: Frame) -> StepResult:
    """The result in `packed` words float32 [w]."""
    node, *values = words.tolist()
    draft, n = frame.draft, len(frame.draft.tree)
    parts = [values[at : at + n] for at in range(0, len(values), n)]
    rows = dict(zip(frame.names, parts, strict=True))
    rows |= {name: [int(token) for token in rows[name]] for name in ("tokens", "sampled")}
    path = list(draft.tree.paths[int(node)])
    record = _record(draft, rows) if "log_probabilities" in rows else None
    is_finite = math.isfinite(rows["entropies"][int(node)])
    tokens = [rows["tokens"][i] for i in path]
    return StepResult(path, tokens, rows["sampled"][int(node)], is_finite, n, record)


def _record(draft: Draft, rows: dict[str, list[Any]]) -> DraftRecord:
    """The draft as a trace holds it; figures that the root does not have are None, and those of
    the heads at nodes that only the text proposed."""
    tokens, tree = rows["tokens"], draft.tree
    nothing = (None,) * len(tokens)
    known = nothing if draft.shares is None else draft.shares
    sources = draft.sources or ("heads",) * len(tokens)
    is_own = [node > 0 and source != "text" for node, source in enumerate(sources)]
    shares = zip(rows.get("shares", known), is_own, strict=True)
    ranks = zip(tree.ranks, is_own, strict=True)
    return DraftRecord(
        tokens=tuple(tokens),
        parents=tree.parents,
        ranks=tuple(rank if own else None for rank, own in ranks),
        draft_probabilities=tuple(share if own else None for share, own in shares),
        probabilities=(None, *(math.exp(min(p, 0.0)) for p in rows["log_probabilities"][1:])),
        entropies=tuple(rows["entropies"]),
        thresholds=tuple(rows.get("thresholds", nothing)),
        sampled=tuple(rows["sampled"]),
        guesses=draft.guesses,
        sources=draft.sources,
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
        path = tuple(result.path[: count + 1])
        parts = result.heads_seconds, result.backbone_seconds, result.nodes
        return Step(index, tuple(fresh), "", seconds, path, result.record, *parts, why)

    def finished(self) -> Finished:
        """The last event. It has ended."""
        assert self.reason is not None
        timing = (self._steps, self._emitted, self._seconds, self.prefill_seconds)
        message = BROKEN if self.reason == "error" else ""
        stats = Stats.of(len(self.ids), *timing)
        return Finished(self.reason, tuple(self.ids), "", "", stats, message)

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
