"""PipelinedGraphRunner: recorded steps, the next one queued before the last is read."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep, DeviceSettings, kind_of
from medusa_chat.decoding.backends.graph_capture import GraphCapture, State
from medusa_chat.decoding.drafters import Plan
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings
from medusa_chat.decoding.step_result import DecodeState, Frame, StepResult, unpacked
from medusa_chat.decoding.stopwatch import Stopwatch

# keys that a step reads: texts of round lengths, and the largest tree
ROUND = [256, 512, *(n * 2**i for i in range(10, 17) for n in (1, 1.5)), 2**17]
BUCKETS = tuple(int(length) + MAX_NODES for length in ROUND)
ASKED = 3  # times, before a step is recorded: what comes once or twice is not worth it
MOST_KINDS = 48  # of steps that are kept recorded
NOT_RECORDED = "steps of %d nodes cannot be recorded, and run by their parts: %s"


@dataclass
class Kind:
    """Steps that differ only in how long the text is, with what they hold on to."""

    plan: Plan
    settings: DeviceSettings
    asked: int = 0
    steps: dict[int, CudaGraphStep] = field(default_factory=dict)
    is_refused: bool = False


@dataclass(frozen=True)
class Queued:
    """A step in the device's queue: where its words and its last state will be, how they are read,
    and when it begins and ends."""

    kind: Kind
    frame: Frame
    words: Tensor
    hidden: Tensor
    begin: Any
    end: Any


class PipelinedGraphRunner:
    """See WholeStep: any acceptance, plain decoding and trees that the heads fill whole.

    What a step needs of the last one stays on the device. Where the last two steps of an answer
    were of one kind the next is taken to be so too, and is in the queue before the host reads the
    last one; where it turns out to be another, what was queued is dropped, which leaves no trace:
    it wrote behind the text.
    """

    threads, tries = 0, ASKED

    def __init__(self, backbone: Backbone) -> None:
        self.hidden = torch.empty(0)
        self.seconds = 0.0
        self._backbone, self._watch = backbone, Stopwatch(backbone.device)
        self._is_cuda = backbone.device.type == "cuda"
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._recorder: GraphCapture | None = None
        self._here: DecodeState | None = None  # of the last step
        self._length = -1  # tokens in the cache behind it
        self._last: Kind | None = None
        self._queued: Queued | None = None
        self._hiddens: list[Tensor] = []
        self._words: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._turn = 0
        self._is_over = self._has_said = False

    def read(
        self, tokens: Sequence[int], settings: GenerationSettings, least: float
    ) -> StepResult | None:
        """See WholeStep: a text is its parts' to read."""
        return None

    def take(self, plan: Plan, root: int, here: DecodeState) -> list[StepResult] | None:
        """See WholeStep: one step."""
        if self._is_over or not _is_fixed(plan):
            return None
        kind = self._kind_of(plan, here)
        kind.asked += 1
        if kind.is_refused or kind.asked < ASKED:
            return None
        try:
            with torch.inference_mode():
                return [self._step(kind, root, here)]
        except Exception as error:  # a device, a layer or a memory that cannot: its parts can
            self._refuse(kind, error)
            return None

    def _step(self, kind: Kind, root: int, here: DecodeState) -> StepResult:
        cache, deep = self._backbone.cache, kind.plan.tree.depth + 1
        start = cache.length
        is_next = here is self._here and start == self._length
        queued, self._queued = self._queued if is_next else None, None
        if not is_next:
            self._begin(start, root, here)
        elif queued is not None and queued.kind is not kind:
            self._state.put(start, root, self.hidden)
            queued = None
        if queued is None:
            queued = self._queue(kind, here, start)
        is_room = start + 2 * deep < self._backbone.context and here.most > deep
        if is_next and kind is self._last and is_room:
            self._queued = self._queue(kind, here, start + deep)
        self._last, self._here = kind, here
        outcome = self._read(queued)
        self.hidden = queued.hidden
        if outcome.is_finite:
            cache.extend(len(outcome.path))
        self._length = cache.length if outcome.is_finite else -1
        return outcome

    def _begin(self, length: int, root: int, here: DecodeState) -> None:
        """Behind a text that others have worked on since."""
        if self._recorder is None:
            self._recorder = GraphCapture(self._backbone, State.like(here.hidden))
            self._hiddens = [self._state.hidden.clone() for _ in range(2)]
        self._state.put(length, root, here.hidden)
        self._last = None

    @property
    def _state(self) -> State:
        assert self._recorder is not None
        return self._recorder.state

    def _queue(self, kind: Kind, here: DecodeState, length: int) -> Queued:
        """A step behind `length` tokens or fewer, as the state on the device has it."""
        if here is not self._here or kind is not self._last:
            kind.settings.follow(here.settings)
        step = self._recorded(kind, here, length)
        self._turn = 1 - self._turn
        hidden, begin = self._hiddens[self._turn], self._watch.mark()
        step.replay()
        words = self._host_words(step.out)
        words.copy_(step.out, non_blocking=True)
        hidden.copy_(self._state.hidden)
        return Queued(kind, step.frame, words, hidden, begin, self._watch.mark())

    def _host_words(self, out: Tensor) -> Tensor:
        """Where the host reads them, another place than for the step before."""
        key = self._turn, len(out), out.dtype
        if key not in self._words:
            self._words[key] = torch.empty(out.shape, dtype=out.dtype, pin_memory=self._is_cuda)
        return self._words[key]

    def _read(self, queued: Queued) -> StepResult:
        """The one wait of a step."""
        if self._is_cuda:
            queued.end.synchronize()
        outcome = unpacked(queued.words, queued.frame)
        outcome.backbone_seconds = self._watch.between(queued.begin, queued.end)
        self.seconds += outcome.backbone_seconds
        return outcome

    def _recorded(self, kind: Kind, here: DecodeState, length: int) -> CudaGraphStep:
        """The kind's step for the smallest bucket with room for its rows behind `length` tokens."""
        capacity = self._backbone.cache.capacity
        rows, nodes = self._backbone.rows, len(kind.plan.tree)
        needed = length + nodes + -nodes % rows
        bucket = min(next((b for b in BUCKETS if b >= needed), capacity), capacity)
        step = kind.steps.get(bucket)
        if step is None:
            assert self._recorder is not None
            step = CudaGraphStep(self._recorder, kind.plan, here, kind.settings, bucket)
            kind.steps[bucket] = step
        return step

    def _kind_of(self, plan: Plan, here: DecodeState) -> Kind:
        rule, settings = here.settings.acceptance, kind_of(here.settings)
        key = (id(plan.tensors), id(plan.index), rule, here.details, settings)
        found = self._kinds.pop(key, None)
        if found is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            found = Kind(plan, DeviceSettings(here.settings, self._backbone.device))
        self._kinds[key] = found  # the last one asked for stays longest
        return found

    def _refuse(self, kind: Kind, error: Exception) -> None:
        """This kind is left to its parts from now on; all are where memory ran out, for they may
        need what recordings hold."""
        self._here = self._last = self._queued = None
        kind.is_refused = True
        kind.steps.clear()
        if isinstance(error, torch.OutOfMemoryError):
            self._is_over = True
            self._kinds.clear()
        if self._recorder is not None:
            self._recorder.mend()
        if self._is_cuda:
            torch.cuda.empty_cache()
        if not self._has_said:
            self._has_said = True
            cause = error.__context__ or error  # a broken capture speaks of itself
            said = str(cause).strip().partition("\n")[0]
            nodes = len(kind.plan.tree)
            logging.getLogger(__name__).warning(NOT_RECORDED, nodes, said)


def _is_fixed(plan: Plan) -> bool:
    """Whether its step can be recorded: the root alone, or guesses that fill the whole tree."""
    if plan.grower is not None or plan.least:
        return False
    return len(plan.tree) == 1 or plan.index is not None
