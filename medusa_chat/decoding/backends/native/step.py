"""NativeStep: draft, backbone pass, logits, acceptance and cache rows as one call into C."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_float, c_int64, pointer
from math import exp
from typing import Any

import torch

from medusa_chat.decoding.backends.native.decoder import NativeDecoder
from medusa_chat.decoding.backends.native.heads import NativeHeads
from medusa_chat.decoding.backends.native.library import NativeThreads
from medusa_chat.decoding.backends.native.prefill import Reading
from medusa_chat.decoding.backends.native.run import NativeRun
from medusa_chat.decoding.backends.native.structs import Pass, Step, Verdict
from medusa_chat.decoding.backends.native.tree_shape import Shape
from medusa_chat.decoding.drafters import Plan
from medusa_chat.decoding.dynamic_tree import subtree
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.settings import CHUNK, MAX_NODES, GenerationSettings
from medusa_chat.decoding.step_result import DecodeState, StepResult, record
from medusa_chat.decoding.tree import ROOT

MOST_SHAPES = 64  # of trees that are kept ready
ROOM = 256  # tokens by which a pass's work space grows
FIGURES = ("at_parent", "entropies", "sums", "thresholds")


class NativeStep:
    """A WholeStep for exact and typical acceptance, without top-k and top-p, of models with one
    kind of attention layer.

    The work space is allocated once, for the largest tree. seconds: time of all steps so far in C.
    """

    tries = 0

    def __init__(
        self, backbone: Any, decoder: NativeDecoder, heads: NativeHeads | None, team: NativeThreads
    ) -> None:
        """backbone: its LM head is native already. heads: None where there are none."""
        self._cache, self._window = backbone.cache, backbone.windows[0]
        self._heads, self._team, self._decoder = heads, team, decoder
        lm = backbone.lm_head.linear
        size = lm.outs
        self.hidden = torch.zeros(1, decoder.hidden)
        self._logits = torch.empty(MAX_NODES, size)
        self._rows = torch.empty(MAX_NODES, decoder.hidden)
        self._noise = torch.empty(0)
        ids = [(c_int64 * MAX_NODES)() for _ in range(4)]
        self._tokens, self._own, self._path, self._places = ids
        self._figures = [(c_float * MAX_NODES)() for _ in FIGURES]
        self._shares = (c_float * MAX_NODES)()
        self.seconds, self.threads = 0.0, team.threads
        self._shapes: dict[tuple[int, int, bool], Shape] = {}
        self._shape: Shape | None = None  # of the last step
        self._settings: GenerationSettings | None = None  # and how it was decided
        self._details = self._is_known = self._is_typical = False
        self._room = (0, 0)
        self._pass = Pass.from_buffer_copy(decoder.job)
        self._pass.tokens, self._pass.positions = addressof(self._tokens), addressof(self._places)
        self._pass.hidden = self._rows.data_ptr()
        self._verdict = Verdict(self._logits.data_ptr(), size=size)
        self._verdict.tokens = addressof(self._tokens)
        self._verdict.own, self._verdict.path = addressof(self._own), addressof(self._path)
        self._job = Step(None, pointer(self._pass), pointer(self._verdict))
        self._job.lm_panels, self._job.lm_bias = lm.panels.data_ptr(), lm.bias_at
        self._job.tokens, self._job.positions = addressof(self._tokens), addressof(self._places)
        self._job.logits, self._job.last = self._logits.data_ptr(), self.hidden.data_ptr()
        self._run, self._context = NativeRun(self._job, team), backbone.context
        self._reading: Reading | None = None

    def read(
        self, tokens: Sequence[int], settings: GenerationSettings, least: float
    ) -> StepResult | None:
        """See WholeStep."""
        count, start = len(tokens), self._cache.length
        if settings is not self._settings or self._details:
            self._arm(settings, False)
        is_seen = self._window is None or start + count <= self._window
        if not (self._is_known and is_seen) or count > CHUNK:
            return None
        reading = self._reading
        if reading is None:
            reading = self._reading = Reading(self._job, self._pass, self._rows.shape[1])
            reading.follow(self._verdict)
        verdict = reading.verdict
        verdict.place, verdict.least = start + count - 1, least
        self._decoder.make_room(count, -(-(start + count) // ROOM) * ROOM, self._pass.threads)
        job = reading.at(tokens, start, self._pass.threads, self._decoder.job.work)
        if self._team.step(byref(job)):
            return None
        self._cache.extend(count)
        made = StepResult([0], [tokens[-1]], self._own[0], bool(verdict.is_finite))
        made.certainty = verdict.certainty
        return made

    def decode_steps(self, plan: Plan, root: int, state: DecodeState) -> list[StepResult] | None:
        """See WholeStep. Fields that do not change from step to step are not written again."""
        if state.settings is not self._settings or state.details != self._details:
            self._arm(state.settings, state.details)
        shape, start = self._shape_of(plan), self._cache.length
        is_seen = self._window is None or start + shape.depth < self._window
        if not (self._is_known and is_seen) or (plan.tokens is None and shape.draft is None):
            return None
        if shape is not self._shape:
            self._turn_to(shape)
        if state.hidden is not self.hidden:
            self.hidden.copy_(state.hidden)
        self._set_place(shape, plan, root, start)
        found = self._run.decode_steps(plan, state, start, self._longest(shape))
        if found is None:
            return None
        last = found[-1]
        last.is_finite, last.certainty = bool(self._verdict.is_finite), self._verdict.certainty
        if state.details:  # then there is one step
            last.record = self._record(plan, shape, last.nodes, self._run.asked)
        self._cache.extend(sum(len(one.path) for one in found if one.is_finite))
        self.seconds += self._run.seconds
        return found

    def _arm(self, settings: GenerationSettings, details: bool) -> None:
        """Prepare for answers of these settings."""
        job = self._verdict
        self._settings, self._details = settings, details
        self._is_typical = settings.acceptance == "typical" and not settings.is_greedy
        is_cut = settings.top_k or settings.top_p < 1
        is_exact = settings.acceptance == "exact" and not is_cut
        self._is_known = settings.is_greedy or self._is_typical or is_exact
        job.seed = settings.seed or 0
        job.temperature = 0.0 if settings.is_greedy else settings.temperature
        job.is_typical = self._is_typical
        job.epsilon, job.alpha = settings.posterior_threshold, settings.posterior_alpha
        for name, row in zip(FIGURES, self._figures, strict=True):
            setattr(job, name, addressof(row) if details or self._is_typical else None)
        job.threads = self._pass.threads = self._team.threads
        if self._reading is not None:
            self._reading.follow(job)

    def _shape_of(self, plan: Plan) -> Shape:
        key = id(plan.tensors), id(plan.index), plan.grower is None
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            draft = self._heads.draft(plan) if self._heads else None
            found = self._shapes[key] = Shape(plan, draft)
            if draft is not None:
                draft.hidden, draft.tokens = self._job.last, self._job.tokens
                draft.shares, draft.threads = addressof(self._shares), self._team.threads
        return found

    def _turn_to(self, shape: Shape) -> None:
        """Prepare for steps of this tree."""
        self._shape, job = shape, self._verdict
        job.parents, job.depths = shape.parents, shape.depths
        job.rows, job.deepest = shape.nodes, shape.depth  # a dynamic tree sets them in C
        self._run.turn_to(shape)
        if self._noise.numel() < (shape.depth + 1) * job.size:
            self._noise = torch.empty((shape.depth + 1) * job.size)
            job.noise = self._noise.data_ptr()
        self._pass.mask, self._pass.stride = shape.hides, shape.nodes
        self._pass.rows = shape.nodes
        self._job.draft = shape.pointer

    def _set_place(self, shape: Shape, plan: Plan, root: int, start: int) -> None:
        """Set the step's position: `start` tokens in the cache, and the root."""
        job, keys = self._pass, -(-(start + shape.nodes) // ROOM) * ROOM
        job.start = job.free = self._verdict.place = start
        if (shape.nodes, keys) != self._room:
            self._room = (shape.nodes, keys)
            self._decoder.make_room(shape.nodes, keys, job.threads)
        job.work = self._decoder.job.work  # reading a prompt may have moved it
        if shape.draft is not None:
            shape.draft.root = self._tokens[0] = root
        elif plan.tokens is not None:
            self._tokens[: shape.nodes] = list(plan.tokens)

    def _longest(self, shape: Shape) -> int:
        """The largest number of tokens in the cache at which a step of this tree can begin."""
        window = self._context if self._window is None else self._window
        found: int = min(self._context, window) - 1 - shape.depth
        return min(found, self._room[1] - shape.nodes)

    def _record(self, plan: Plan, shape: Shape, n: int, asked: int) -> DraftRecord:
        tokens, own = self._tokens[:n], self._own[:n]
        found, entropies, _, thresholds = (row[:n] for row in self._figures)
        shares = self._shares[:n] if asked else None
        limits = thresholds if self._is_typical else None
        chances = [exp(x) for x in found]
        if shape.growth is None or self._heads is None or shape.draft is None:
            return record(plan.tree, tokens, own, chances, entropies, limits, shares)
        tree = subtree(plan.tree, shape.chosen(n)) if asked else ROOT
        guesses = self._heads.guesses(shape.draft, asked) if asked else ()
        return record(tree, tokens, own, chances, entropies, limits, shares, guesses)
