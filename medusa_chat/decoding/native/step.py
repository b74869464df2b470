"""NativeStep: draft, pass, logits, acceptance and the cache's rows as one call."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_float, c_int64, pointer
from math import exp
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import Plan, TreeTensors
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.growth import Growth, subtree
from medusa_chat.decoding.native.decoder import NativeDecoder
from medusa_chat.decoding.native.heads import NativeHeads
from medusa_chat.decoding.native.jobs import Growth as GrowthJob
from medusa_chat.decoding.native.jobs import Pass, Proposal, Step, Verdict
from medusa_chat.decoding.native.library import Team
from medusa_chat.decoding.outcome import Outcome, record
from medusa_chat.decoding.settings import CHUNK, MAX_NODES, GenerationSettings
from medusa_chat.decoding.tree import ROOT

MOST_SHAPES = 64  # of trees that are kept ready
ROOM = 256  # tokens by which what a pass works in grows
FIGURES = ("at_parent", "entropies", "sums", "thresholds")


class NativeStep:
    """See WholeStep: exact and typical acceptance, without top-k and top-p, of one kind of layer.

    Everything a step is worked out in stands ready, for as many nodes as a tree can have. seconds:
    how long all steps so far were in C; what a step takes beyond that is the host's. threads: of
    the team.
    """

    def __init__(
        self, backbone: Any, decoder: NativeDecoder, heads: NativeHeads | None, team: Team
    ) -> None:
        """backbone: its LM head is native by now. heads: None where there are none."""
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
        self._shapes: dict[tuple[int, int, bool], _Shape] = {}
        self._shape: _Shape | None = None  # of the last step
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
        self._call = byref(self._job)
        self._text: _Text | None = None
        self._alone = Plan(ROOT, TreeTensors.of(ROOT, torch.device("cpu")), None)

    def read(
        self, tokens: Sequence[int], settings: GenerationSettings, least: float
    ) -> Outcome | None:
        """See WholeStep."""
        count, start = len(tokens), self._cache.length
        if settings is not self._settings or self._details:
            self._arm(settings, False)
        is_seen = self._window is None or start + count <= self._window
        if not (self._is_known and is_seen) or count > CHUNK:
            return None
        if self._text is None:
            self._text = _Text(self._job, self._pass, self._rows.shape[1])
        self._turn_to(self._shape_of(self._alone))
        self._verdict.place, self._verdict.least = start + count - 1, least
        self._decoder.make_room(count, -(-(start + count) // ROOM) * ROOM, self._pass.threads)
        job = self._text.at(tokens, start, self._pass.threads, self._decoder.job.work)
        if self._team.step(byref(job)):
            return None
        is_finite = bool(self._verdict.is_finite)
        self._cache.extend(count)
        made = Outcome([0], [tokens[-1]], self._own[0], is_finite, None)
        made.certainty = self._verdict.certainty
        return made

    def take(
        self, plan: Plan, root: int, hidden: Tensor, settings: GenerationSettings, details: bool
    ) -> Outcome | None:
        """See WholeStep. What stays the same from step to step is not set again."""
        if settings is not self._settings or details != self._details:
            self._arm(settings, details)
        shape, start = self._shape_of(plan), self._cache.length
        is_seen = self._window is None or start + shape.depth < self._window
        if not (self._is_known and is_seen) or (plan.tokens is None and shape.draft is None):
            return None
        if shape is not self._shape:
            self._turn_to(shape)
        if hidden is not self.hidden:
            self.hidden.copy_(hidden)
        self._set_place(shape, plan, root, start)
        if self._team.step(self._call):
            return None
        return self._outcome(plan, shape)

    def _arm(self, settings: GenerationSettings, details: bool) -> None:
        """For answers of these settings."""
        job = self._verdict
        self._settings, self._details = settings, details
        self._is_typical = settings.acceptance == "typical" and not settings.is_greedy
        is_cut = settings.top_k or settings.top_p < 1
        is_exact = settings.acceptance == "exact" and not is_cut
        self._is_known = settings.is_greedy or self._is_typical or is_exact
        job.seed, job.temperature = settings.seed or 0, settings.temperature
        job.is_typical = self._is_typical
        job.epsilon, job.alpha = settings.posterior_threshold, settings.posterior_alpha
        for name, row in zip(FIGURES, self._figures, strict=True):
            setattr(job, name, addressof(row) if details or self._is_typical else None)
        job.threads = self._pass.threads = self._team.threads

    def _shape_of(self, plan: Plan) -> "_Shape":
        key = id(plan.tensors), id(plan.index), plan.growth is None
        found = self._shapes.get(key)
        if found is None:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            draft = self._heads.draft(plan) if self._heads else None
            found = self._shapes[key] = _Shape(plan, draft)
            if draft is not None:
                draft.hidden, draft.tokens = self._job.last, self._job.tokens
                draft.shares, draft.threads = addressof(self._shares), self._team.threads
        return found

    def _turn_to(self, shape: "_Shape") -> None:
        """For steps of this tree."""
        self._shape, job = shape, self._verdict
        job.parents, job.depths = shape.parents, shape.depths
        job.rows, job.deepest = shape.nodes, shape.depth
        if self._noise.numel() < (shape.depth + 1) * job.size:
            self._noise = torch.empty((shape.depth + 1) * job.size)
            job.noise = self._noise.data_ptr()
        self._pass.mask, self._pass.stride = shape.hides, shape.nodes
        self._pass.rows = shape.nodes
        self._job.draft = shape.pointer

    def _set_place(self, shape: "_Shape", plan: Plan, root: int, start: int) -> None:
        """Behind `start` tokens, from this root on."""
        job, keys = self._pass, -(-(start + shape.nodes) // ROOM) * ROOM
        self._verdict.least = plan.least
        job.start = job.free = self._verdict.place = start
        if (shape.nodes, keys) != self._room:
            self._room = (shape.nodes, keys)
            self._decoder.make_room(shape.nodes, keys, job.threads)
        job.work = self._decoder.job.work  # a prompt may have had it grow
        if shape.draft is not None:
            shape.draft.root = root
            if plan.growth is not None:
                shape.limit(plan.growth)
                job.rows = min(plan.growth.most, shape.nodes)
        elif plan.tokens is not None:
            self._tokens[: shape.nodes] = list(plan.tokens)

    def _outcome(self, plan: Plan, shape: "_Shape") -> Outcome:
        job, verdict, nodes = self._job, self._verdict, self._pass.rows
        self.seconds += job.whole
        if nodes == 1:
            taken, tokens, own = [0], [self._tokens[0]], [self._own[0]]
        else:
            taken, tokens = self._path[: verdict.length], self._tokens[:nodes]
            own = self._own[:nodes]
        is_finite = bool(verdict.is_finite)
        if is_finite:
            self._cache.extend(len(taken))
        made = self._record(plan, shape, tokens, own) if self._details else None
        last = own[taken[-1]]
        timed = job.drafting, job.passing
        return Outcome(taken, tokens, last, is_finite, made, *timed, verdict.certainty)

    def _record(
        self, plan: Plan, shape: "_Shape", tokens: list[int], own: list[int]
    ) -> DraftRecord:
        n = len(tokens)
        found, entropies, _, thresholds = (row[:n] for row in self._figures)
        shares = self._shares[:n] if plan.tokens is None else None
        limits = thresholds if self._is_typical else None
        chances = [exp(x) for x in found]
        if shape.growth is None or self._heads is None or shape.draft is None:
            return record(plan.tree, tokens, own, chances, entropies, limits, shares)
        tree = subtree(plan.tree, shape.chosen(n))
        guesses = self._heads.guesses(shape.draft, shape.growth.asked)
        return record(tree, tokens, own, chances, entropies, limits, shares, guesses)


class _Text:
    """Where a text is read: the job of a step whose rows follow each other."""

    def __init__(self, step: Step, rows: Pass, size: int) -> None:
        """step, rows: those of the steps after it, with which it shares where it is worked out."""
        self._ids, self._places = ((c_int64 * CHUNK)() for _ in range(2))
        self._hidden = torch.empty(CHUNK, size)
        self._hides = torch.full((CHUNK, CHUNK), -torch.inf).triu_(1)
        self._pass = Pass.from_buffer_copy(rows)
        self._pass.mask, self._pass.stride = self._hides.data_ptr(), CHUNK
        self._pass.hidden = self._hidden.data_ptr()
        self._pass.tokens, self._pass.positions = addressof(self._ids), addressof(self._places)
        self._job = Step.from_buffer_copy(step)
        self._job.draft, self._job.work, self._job.is_text = None, pointer(self._pass), 1
        self._job.tokens, self._job.positions = self._pass.tokens, self._pass.positions

    def at(self, tokens: Sequence[int], start: int, threads: int, work: int) -> Step:
        """The job that reads these behind `start` tokens."""
        job = self._pass
        self._ids[: len(tokens)] = list(tokens)
        job.rows, job.start, job.free = len(tokens), start, start
        job.threads, job.work = threads, work
        return self._job


class _Shape:
    """What stays the same for a tree: where its parents, depths and the ancestors' mask [n, n],
    additive, are; the heads' job; and where only a part of it is drafted, what says which."""

    def __init__(self, plan: Plan, draft: Proposal | None) -> None:
        self.nodes, self.depth = len(plan.tree), plan.tree.depth
        self._tensors, self._index = plan.tensors, plan.index  # addresses of theirs are kept here
        hidden = ~plan.tensors.ancestors
        self._mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self.parents, self.depths = plan.tensors.parents.data_ptr(), plan.tensors.depths.data_ptr()
        self.hides = self._mask.data_ptr()
        self.draft = draft
        self.pointer = pointer(draft) if draft is not None else None
        self.growth: GrowthJob | None = None
        if draft is not None and plan.growth is not None:
            self.growth = self._growth()
            draft.growth = pointer(self.growth)

    def _growth(self) -> GrowthJob:
        """A job that grows a part of this tree, whose rows are then the pass's."""
        job, size = GrowthJob(self.parents, self.depths, self.hides), self.nodes
        self._own = torch.zeros(3, size, dtype=torch.long)
        self._own_mask = torch.zeros(size, size)
        self._seconds: tuple[float, ...] = ()
        job.nodes = job.stride = size
        job.chosen, job.own_parents, job.own_depths = (row.data_ptr() for row in self._own)
        job.own_mask = self._own_mask.data_ptr()
        self.parents, self.depths = job.own_parents, job.own_depths
        self.hides = job.own_mask
        return job

    def limit(self, growth: Growth) -> None:
        """What a step may cost, and what the heads are worth now."""
        job = self.growth
        assert job is not None
        if growth.seconds is not self._seconds:
            self._seconds = growth.seconds
            self._prices = (c_double * len(growth.seconds))(*growth.seconds)
            job.seconds = addressof(self._prices)
        job.most = min(growth.most, len(growth.seconds))
        job.rate, job.gate = growth.rate, growth.gate

    def chosen(self, count: int) -> tuple[int, ...]:
        """Which nodes the last draft had."""
        return tuple(self._own[0, :count].tolist())
