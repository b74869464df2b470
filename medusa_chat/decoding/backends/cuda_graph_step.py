"""CudaGraphStep: steps as CUDA graphs, the next one queued before the last one is read."""

import logging
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.recorded_pass import RecordedPasses
from medusa_chat.decoding.draft import Draft, Plan
from medusa_chat.decoding.graph_capture import GraphCapture, bucket_of, said_of
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import (
    DecodeState,
    Frame,
    StepResult,
    Stopwatch,
    TorchStep,
    packed,
    row_at,
    run_step,
    unpacked,
)

ASKED = 3  # steps of a kind before it is recorded: a rare kind is not worth a recording
MOST_KINDS = 48  # of recorded steps, at a time


@dataclass(frozen=True)
class State:
    """What a step passes to the next on the device, without the host: cur int64 [1], tokens in the
    cache; root int64 [1]; hidden [1, d], the backbone's state from which it was predicted."""

    cur: Tensor
    root: Tensor
    hidden: Tensor

    @classmethod
    def like(cls, hidden: Tensor) -> "State":
        """A state of zeros, for hidden states of this shape [1, d], dtype and device."""
        cur, root = (torch.zeros(1, dtype=torch.long, device=hidden.device) for _ in range(2))
        return cls(cur, root, torch.zeros_like(hidden))

    def put(self, length: int, root: int, hidden: Tensor) -> None:
        """Set the state: `length` tokens in the cache, the root, and hidden [1, d] in
        the dtype of the pass."""
        self.cur.fill_(length)
        self.root.fill_(root)
        if hidden is not self.hidden:
            self.hidden.copy_(hidden)


class DeviceSettings:
    """The part of GenerationSettings that a rule reads, with numbers as tensors [] on the device,
    so that one graph serves all temperatures, thresholds and seeds. Greedy or not, top-k, top-p
    and min-p change the operators of a step and are constants of a graph."""

    def __init__(self, settings: GenerationSettings, device: torch.device) -> None:
        self.is_greedy, self.top_k, self.top_p, self.min_p = kind_of(settings)
        self._scale, self.posterior_threshold, self.posterior_alpha = torch.ones(3, device=device)
        self.seed = torch.zeros((), dtype=torch.long, device=device)

    @property
    def scale(self) -> Tensor | float:
        """GenerationSettings.scale as a float32 tensor [], or 1.0 where greedy."""
        return 1.0 if self.is_greedy else self._scale

    def follow(self, settings: GenerationSettings) -> None:
        """Take over settings of the same kind (`kind_of`)."""
        if self.is_greedy:
            return
        self._scale.fill_(settings.scale)
        self.posterior_threshold.fill_(settings.posterior_threshold)
        self.posterior_alpha.fill_(settings.posterior_alpha)
        self.seed.fill_(settings.seed or 0)


def kind_of(settings: GenerationSettings) -> tuple[bool, int, float, float]:
    """The settings that need a graph of their own: (is_greedy, top_k, top_p, min_p)."""
    if settings.is_greedy:
        return True, 0, 1.0, 0.0
    return False, settings.top_k, settings.top_p, settings.min_p


class RecordedStep:
    """Steps of one plan and one rule, for texts of at most `bucket` tokens with the plan's nodes.

    `body` never waits for the device, and every shape is fixed: on CUDA it is one graph, elsewhere
    it is called. An attention that takes node masks reads the text's own length; for any other one
    keys and values are read up to `bucket` and masked after the text.
    """

    out: Tensor  # the last step's words [w], see step.packed
    frame: Frame  # their layout

    def __init__(
        self,
        capture: GraphCapture,
        backbone: Backbone,
        here: State,
        plan: Plan,
        state: DecodeState,
        settings: DeviceSettings,
        bucket: int,
    ) -> None:
        """here: where the step starts, and what it changes. plan: the root alone, or one that the
        drafter fills without waiting for the device."""
        self._backbone, self._state = backbone, here
        self._plan, self._answer = plan, state  # of its drafter, acceptance and details alone
        self._settings: Any = settings  # stands for GenerationSettings
        device = backbone.device
        self._nodes = torch.arange(len(plan.tree), device=device)
        self._deep = torch.arange(plan.tree.depth + 1, device=device)
        self._masks = self._backbone.node_masks(plan.tensors)
        self._columns = torch.arange(bucket, device=device)
        self._places = torch.zeros_like(self._nodes)
        self._layers = self._backbone.cache.fixed(self._places, bucket)
        self._is_begun = False
        self.replay = capture.recorded(self.body)

    @torch.inference_mode()
    def body(self) -> None:
        """Queue draft, decoder, acceptance and the move of cache rows, without waiting."""
        state = self._state
        draft, taken, (root, hidden), _ = run_step(
            self._answer,
            self._plan,
            state.root,
            state.hidden,
            state.cur,
            self._settings,
            self._run,
            self._backbone.rows,
        )
        tensors = self._plan.tensors
        source = (state.cur + row_at(taken.node, tensors.paths)).view(-1)
        self._backbone.cache.move(source, state.cur + self._deep)
        words, self.frame = packed(draft, taken)
        if not self._is_begun:  # outside of any graph: the first warm-up
            self.out, self._is_begun = torch.empty_like(words), True
        self.out.copy_(words)
        state.cur.add_(row_at(taken.node, tensors.depths) + 1)
        state.root.copy_(root)
        state.hidden.copy_(hidden)

    def _run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass at the device's own position: see step.Pass."""
        backbone, cur = self._backbone, self._state.cur
        self._places.copy_(cur + self._nodes)
        positions = cur + self._plan.tensors.depths
        masks = backbone.masks_behind(self._masks, cur, self._columns)
        hidden = backbone.run_fixed(draft.tokens, positions, masks, self._layers)
        return hidden, backbone.lm_head(hidden)


@dataclass
class Kind:
    """Steps that differ only in the length of the text. steps: the recordings, by bucket."""

    plan: Plan
    settings: DeviceSettings
    asked: int = 0
    steps: dict[int, RecordedStep] = field(default_factory=dict)
    is_refused: bool = False


@dataclass(frozen=True)
class Queued:
    """A step in the device's queue: where its words [w] and its last state [1, d] will be, the
    words' layout, and the marks of its begin and end."""

    kind: Kind
    frame: Frame
    words: Tensor
    hidden: Tensor
    begin: Any
    end: Any


class CudaGraphStep:
    """A StepBackend for any acceptance, with plain decoding and trees that the heads fill whole. Of
    a step of another kind, and of one whose logits or states are read, the pass alone is recorded;
    the first ones of each kind are a TorchStep's.

    What a step needs of the last one stays on the device. Where the last two steps of an answer
    were of one kind, a third of this kind is queued before the host reads the last one. If another
    kind is needed the queued step is dropped; it wrote only after the valid rows of the cache.
    """

    name, tries = "one CUDA graph, queued ahead", ASKED

    def __init__(self, backbone: Backbone) -> None:
        self.rows, self.seconds = backbone.rows, 0.0  # seconds: of recorded steps
        self._by_operators, self.by_pass = TorchStep(backbone), RecordedPasses(backbone)
        self.backbone, self._watch = backbone, Stopwatch(backbone.device)
        self._is_cuda = backbone.device.type == "cuda"
        self._kinds: dict[tuple[Any, ...], Kind] = {}
        self._capture: GraphCapture | None = None
        self._here: State | None = None
        self._decode_state: DecodeState | None = None  # of the last step
        self._length = -1  # tokens in the cache after the last step
        self._last: Kind | None = None
        self._queued: Queued | None = None
        self._hiddens: list[Tensor] = []
        self._words: dict[tuple[int, int, torch.dtype], Tensor] = {}
        self._turn = 0
        self._is_over = self._has_said = False

    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """See StepBackend."""
        if not _is_fixed(plan) or state.is_read:
            return self.by_pass.step(state, plan)
        if not self._is_over:
            kind = self._kind_of(plan, state)
            kind.asked += 1
            if not kind.is_refused and kind.asked >= ASKED:
                try:
                    with torch.inference_mode():
                        return self._step(kind, state)
                except Exception as error:  # the device, a layer or the memory: operators can
                    self._refuse(kind, error)
        return self._by_operators.step(state, plan)

    def _step(self, kind: Kind, state: DecodeState) -> StepResult:
        cache, deep = self.backbone.cache, kind.plan.tree.depth + 1
        start = cache.length
        is_next = state is self._decode_state and start == self._length
        queued, self._queued = self._queued if is_next else None, None
        if not is_next:
            self._begin(start, state)
        elif queued is not None and queued.kind is not kind:
            self._state.put(start, state.root_id, state.hidden)
            queued = None
        if queued is None:
            queued = self._queue(kind, state, start)
        is_room = start + 2 * deep < self.backbone.context and state.most > deep
        is_known = kind.plan.text is None  # else the host first puts the next step's tokens there
        if is_next and kind is self._last and is_room and is_known:
            self._queued = self._queue(kind, state, start + deep)
        self._last, self._decode_state = kind, state
        result = self._read(queued)
        state.root_id, state.hidden = result.next_token, queued.hidden
        if result.is_finite:
            cache.extend(len(result.path))
        self._length = cache.length if result.is_finite else -1
        return result

    def _begin(self, length: int, state: DecodeState) -> None:
        """Set the device's state for a step that does not follow the last recorded one."""
        if self._here is None:
            self._here = here = State.like(state.hidden)
            changed = here.cur, here.root, here.hidden
            self._capture = GraphCapture(self.backbone.device, changed)
            self._hiddens = [here.hidden.clone() for _ in range(2)]
        self._state.put(length, state.root_id, state.hidden)
        self._last = None

    @property
    def _state(self) -> State:
        assert self._here is not None
        return self._here

    def _queue(self, kind: Kind, state: DecodeState, length: int) -> Queued:
        """Queue a step after at most `length` tokens; the exact number is in the device's state."""
        if state is not self._decode_state or kind is not self._last:
            kind.settings.follow(state.settings)
        step = self._recorded(kind, state, length)
        self._turn = 1 - self._turn
        hidden, begin = self._hiddens[self._turn], self._watch.mark()
        step.replay()
        words = self._host_words(step.out)
        words.copy_(step.out, non_blocking=True)
        hidden.copy_(self._state.hidden)
        return Queued(kind, step.frame, words, hidden, begin, self._watch.mark())

    def _host_words(self, out: Tensor) -> Tensor:
        """Pinned memory for a step's words [w]; two steps in a row have different buffers."""
        key = self._turn, len(out), out.dtype
        if key not in self._words:
            self._words[key] = torch.empty(out.shape, dtype=out.dtype, pin_memory=self._is_cuda)
        return self._words[key]

    def _read(self, queued: Queued) -> StepResult:
        """Wait for a step, once, and read its result."""
        if self._is_cuda:
            queued.end.synchronize()
        result = unpacked(queued.words, queued.frame)
        result.backbone_seconds = self._watch.between(queued.begin, queued.end)
        self.seconds += result.backbone_seconds
        return result

    def _recorded(self, kind: Kind, state: DecodeState, length: int) -> RecordedStep:
        """The kind's step for the smallest bucket with room for its nodes after `length` tokens; an
        attention that reads the text's length on the device has one bucket."""
        capacity = self.backbone.cache.capacity
        bucket = capacity
        if not self.backbone.takes_words:
            bucket = bucket_of(length + len(kind.plan.tree), capacity)
        step = kind.steps.get(bucket)
        if step is None:
            assert self._capture is not None
            given = self._capture, self.backbone, self._state, kind.plan, state, kind.settings
            step = RecordedStep(*given, bucket)
            kind.steps[bucket] = step
        return step

    def _kind_of(self, plan: Plan, state: DecodeState) -> Kind:
        rule, settings = state.settings.acceptance, kind_of(state.settings)
        key = (id(plan.tensors), id(plan.index), rule, state.details, settings)
        kind = self._kinds.pop(key, None)
        if kind is None:
            if len(self._kinds) >= MOST_KINDS:
                self._kinds.pop(next(iter(self._kinds)))
            kind = Kind(plan, DeviceSettings(state.settings, self.backbone.device))
        self._kinds[key] = kind  # at the end: the least recently used one is dropped first
        return kind

    def _refuse(self, kind: Kind, error: Exception) -> None:
        """Run this kind by operators from now on; after running out of memory all kinds, for the
        graphs hold memory that operators may need."""
        self._decode_state = self._last = self._queued = None
        kind.is_refused = True
        kind.steps.clear()
        if isinstance(error, torch.OutOfMemoryError):
            self._is_over = True
            self._kinds.clear()
            self.by_pass.stop()
        if self._capture is not None:
            self._capture.recover()
        if self._is_cuda:
            torch.cuda.empty_cache()
        if not self._has_said:
            self._has_said = True
            log = logging.getLogger(__name__)
            log.warning(
                "steps of %d nodes run by torch operators, not as a CUDA graph: %s",
                len(kind.plan.tree),
                said_of(error),
                exc_info=error if log.isEnabledFor(logging.DEBUG) else None,
            )


def _is_fixed(plan: Plan) -> bool:
    """Whether the step can be recorded: the root alone, or guesses that fill the whole tree."""
    return len(plan.tree) == 1 or (plan.index is not None and not plan.is_grown)
