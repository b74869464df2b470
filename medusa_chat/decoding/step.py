"""A decoding step: draft, pass, acceptance, cache, result; TorchStep runs it by torch."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import ACCEPTANCE, Acceptance, Position, Rows, VerifyInput
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.draft import Draft, Plan
from medusa_chat.decoding.drafters.drafter import Drafting
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.penalties import Penalties
from medusa_chat.decoding.settings import GenerationSettings

Pass = Callable[[Draft], tuple[Tensor, Tensor]]  # of n nodes -> hidden [n, d], logits [n, V]


@dataclass
class DecodeState:
    """How an answer is decoded, and its current position, which every step moves on. root_id: the
    root; hidden [1, d]: the backbone's state from which it was predicted, on the device; most:
    tokens still to generate; keeps_logits, keeps_states: whether results have them; penalties:
    None: none."""

    drafting: Drafting
    settings: GenerationSettings
    details: bool
    hidden: Tensor
    root_id: int
    most: int = 1
    keeps_logits: bool = False
    keeps_states: bool = False
    penalties: Penalties | None = None

    @property
    def is_read(self) -> bool:
        """Whether the host changes the step's logits, or results have them or its states."""
        return self.keeps_logits or self.keeps_states or self.penalties is not None


@dataclass
class StepResult:
    """The result of one step. path: the accepted nodes, the root first; tokens: theirs; nodes: of
    the draft. heads_seconds: time of drafting; backbone_seconds: of the pass, LM head included.
    logits [nodes, V]; states [path, d] after the final norm, and taps [path, k, d] where the
    backbone is tapped: where the state asks for them."""

    path: list[int]
    tokens: list[int]
    next_token: int
    is_finite: bool
    nodes: int = 1
    record: DraftRecord | None = None
    heads_seconds: float = 0.0
    backbone_seconds: float = 0.0
    logits: Tensor | None = None
    states: Tensor | None = None
    taps: Tensor | None = None


class StepBackend(Protocol):
    """Runs decoding steps on a backbone: chosen when a model is loaded, given to its engine."""

    backbone: Backbone
    name: str  # what a step is here, in a few words
    tries: int  # steps of one kind before they run at full speed
    rows: Rows  # what reads logits

    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """One step: draft, pass, acceptance. Accepted rows are in the cache afterwards, and `state`
        describes the position after them."""


def run_step(
    state: DecodeState,
    plan: Plan,
    root: Tensor,
    hidden: Tensor,
    position: Position,
    settings: Any,
    run: Pass,
    rows: Rows,
    mark: Callable[[], Any] = lambda: None,
) -> tuple[Draft, Acceptance, tuple[Tensor, Tensor], list[Any]]:
    """The body of every step, which never waits for the device: draft, pass, acceptance -> the
    first and last of these, the next root [1] and hidden [1, d], and `mark`s before the draft,
    after it and after the pass.

    root int64 [1] and hidden [1, d] on the device; position: of the root; settings: the state's,
    or what stands for them in a recording; rows: what reads the logits.
    """
    marks = [mark()]
    draft = state.drafting.fill(plan, root, hidden, state.details)
    marks.append(mark())
    states, logits = run(draft)
    marks.append(mark())
    rule = ACCEPTANCE[state.settings.acceptance]
    accepted = rule(VerifyInput(draft, logits, position, settings, state.details, rows))
    following = row_at(accepted.node, accepted.sampled), row_at(accepted.node, states)
    return draft, accepted, following, marks


class TorchStep:
    """A StepBackend on any device and for any model family, which waits for the device once a step,
    to read the result."""

    name, tries = "torch operators", 0

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self._watch = backbone, Stopwatch(backbone.device)
        self.rows = backbone.rows

    @torch.inference_mode()
    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """See StepBackend."""
        cache, watch = self.backbone.cache, self._watch
        root = torch.tensor([state.root_id], device=self.backbone.device)
        kept: list[Tensor] = []

        def run(draft: Draft) -> tuple[Tensor, Tensor]:
            hidden, scores = self.run(draft)
            if state.penalties is not None:
                state.penalties.apply(scores, draft)
            kept.extend((hidden, scores))
            return hidden, scores

        draft, accepted, (_, hidden), marks = run_step(
            state,
            plan,
            root,
            state.hidden,
            cache.length,
            state.settings,
            run,
            self.rows,
            watch.mark,
        )
        result = read(draft, accepted)
        states, logits = kept
        result.logits = logits if state.keeps_logits else None
        if state.keeps_states:
            result.states = states[result.path]
            result.taps = self.tapped[result.path] if self.backbone.is_tapped else None
        if result.is_finite:
            cache.keep(result.path)
        state.root_id, state.hidden = result.next_token, hidden
        result.heads_seconds = watch.between(marks[0], marks[1])
        result.backbone_seconds = watch.between(marks[1], marks[2])
        return result

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass over n nodes -> hidden [n, d] after the final norm, in the
        backbone's dtype, and logits [n, V]."""
        hidden = self.backbone.run_tree(draft.tokens, draft.tensors)
        return hidden, self.backbone.lm_head(hidden)

    @property
    def tapped(self) -> Tensor:
        """What the last `run` left at the backbone's taps, [n, k, d]."""
        return self.backbone.tapped


def row_at(node: Tensor, rows: Tensor) -> Tensor:
    """The row of `node` int64 [1] among rows [n, ...] -> [1, ...]."""
    return rows if rows.shape[0] == 1 else rows.index_select(0, node)


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
    the drafter at nodes that only the text proposed."""
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


class Stopwatch:
    """Marks points in the work queued on a device and gives the seconds between them.

    On CUDA a mark is an event in the stream, so a part's time is the device's own and not that of
    launching it; `between` may be asked once the device has passed both marks. Elsewhere work is
    done when the call returns, and a mark is the host's clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda, self._device = device.type == "cuda", device

    def mark(self) -> Any:
        """A mark after the work queued so far."""
        if not self._is_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between(self, start: Any, end: Any) -> float:
        """Seconds from one mark to a later one."""
        return float(start.elapsed_time(end)) / 1000 if self._is_cuda else float(end - start)
