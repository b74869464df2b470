"""NativeStep: draft, pass, logits, acceptance and the cache's rows as one call."""

from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_float, c_int64, pointer
from math import exp
from typing import Any

import torch

from medusa_chat.decoding.drafters import Plan, TreeTensors
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.governor import STRIDE
from medusa_chat.decoding.growth import subtree
from medusa_chat.decoding.native.account import NativeAccount
from medusa_chat.decoding.native.decoder import NativeDecoder
from medusa_chat.decoding.native.heads import NativeHeads
from medusa_chat.decoding.native.jobs import Growth as GrowthJob
from medusa_chat.decoding.native.jobs import Pass, Proposal, Run, Step, Verdict
from medusa_chat.decoding.native.library import Team
from medusa_chat.decoding.outcome import Here, Outcome, record
from medusa_chat.decoding.settings import CHUNK, MAX_NODES, GenerationSettings
from medusa_chat.decoding.tree import ROOT

MOST_SHAPES = 64  # of trees that are kept ready
ROOM = 256  # tokens by which what a pass works in grows
MOST_STEPS = 64  # of one call
MOMENT = 0.002  # seconds, after which no other step begins in it: nobody waits for so little
HEADER = 4  # of a step's row among the ids, before its path and the path's tokens
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
        self._account, self._context = NativeAccount(), backbone.context
        self._run = Run(pointer(self._job), seconds=MOMENT)
        self._ids = (c_int64 * (MOST_STEPS * (HEADER + 2)))()
        self._times = (c_double * (MOST_STEPS * 3))()
        self._ends_of: tuple[int, ...] | None = None
        self._run.ids, self._run.times = addressof(self._ids), addressof(self._times)
        self._call = byref(self._run)
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
        made = Outcome([0], [tokens[-1]], self._own[0], is_finite)
        made.certainty = self._verdict.certainty
        return made

    def take(self, plan: Plan, root: int, here: Here) -> list[Outcome] | None:
        """See WholeStep. What stays the same from step to step is not set again."""
        if here.settings is not self._settings or here.details != self._details:
            self._arm(here.settings, here.details)
        shape, start = self._shape_of(plan), self._cache.length
        is_seen = self._window is None or start + shape.depth < self._window
        if not (self._is_known and is_seen) or (plan.tokens is None and shape.draft is None):
            return None
        if shape is not self._shape:
            self._turn_to(shape)
        if here.hidden is not self.hidden:
            self.hidden.copy_(here.hidden)
        self._set_place(shape, plan, root, start)
        self._bound(shape, plan, here, start)
        if plan.grower is not None:
            self._account.open(plan.grower, start, plan.asks)
        if self._team.steps(self._call):
            return None
        if plan.grower is not None:
            self._account.close(plan.grower)
        return self._outcomes(plan, shape)

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
        key = id(plan.tensors), id(plan.index), plan.grower is None
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
        job.rows, job.deepest = shape.nodes, shape.depth  # a growth says them anew
        run, most = self._run, shape.depth + 1
        run.rows, run.longest, run.stride = shape.nodes, most, HEADER + 2 * most
        if len(self._ids) < MOST_STEPS * run.stride:
            self._ids = (c_int64 * (MOST_STEPS * run.stride))()
            run.ids = addressof(self._ids)
        run.account = pointer(self._account.job) if shape.growth is not None else None
        if self._noise.numel() < (shape.depth + 1) * job.size:
            self._noise = torch.empty((shape.depth + 1) * job.size)
            job.noise = self._noise.data_ptr()
        self._pass.mask, self._pass.stride = shape.hides, shape.nodes
        self._pass.rows = shape.nodes
        self._job.draft = shape.pointer

    def _set_place(self, shape: "_Shape", plan: Plan, root: int, start: int) -> None:
        """Behind `start` tokens, from this root on."""
        job, keys = self._pass, -(-(start + shape.nodes) // ROOM) * ROOM
        job.start = job.free = self._verdict.place = start
        if (shape.nodes, keys) != self._room:
            self._room = (shape.nodes, keys)
            self._decoder.make_room(shape.nodes, keys, job.threads)
        job.work = self._decoder.job.work  # a prompt may have had it grow
        if shape.draft is not None:
            shape.draft.root = self._tokens[0] = root
        elif plan.tokens is not None:
            self._tokens[: shape.nodes] = list(plan.tokens)

    def _bound(self, shape: "_Shape", plan: Plan, here: Here, start: int) -> None:
        """How far steps may follow each other: for a moment, in what room there is."""
        run, longest = self._run, self._room[1] - shape.nodes
        longest = min(longest, self._context - 1 - shape.depth)
        if self._window is not None:
            longest = min(longest, self._window - 1 - shape.depth)
        if plan.grower is not None:  # whose costs are those of a stretch
            longest = min(longest, start // STRIDE * STRIDE + STRIDE - 1)
        run.last_start, run.most_tokens = longest, here.most
        run.certainty, run.least = here.certainty, plan.least
        run.most_steps = MOST_STEPS if plan.is_lasting and not here.details else 1
        if here.ends is not self._ends_of:
            self._ends_of = here.ends
            self._ends = (c_int64 * len(here.ends))(*here.ends)
            run.ends, run.end_count = addressof(self._ends), len(here.ends)

    def _outcomes(self, plan: Plan, shape: "_Shape") -> list[Outcome]:
        run, stride, longest = self._run, self._run.stride, self._run.longest
        self.seconds += run.whole
        ids, times = self._ids[: run.count * stride], self._times[: run.count * 3]
        found = []
        for number in range(run.count):
            at, timed = number * stride, times[3 * number : 3 * number + 3]
            nodes, length, following, asked = ids[at : at + HEADER]
            first = at + HEADER + longest
            path, tokens = ids[at + HEADER : at + HEADER + length], ids[first : first + length]
            found.append(Outcome(path, tokens, following, True, nodes, None, *timed))
        last = found[-1]
        last.is_finite, last.certainty = bool(self._verdict.is_finite), self._verdict.certainty
        if self._details:  # then it is alone
            last.record = self._record(plan, shape, last.nodes, asked)
        self._cache.extend(sum(len(o.path) for o in found if o.is_finite))
        return found

    def _record(self, plan: Plan, shape: "_Shape", n: int, asked: int) -> DraftRecord:
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
        if draft is not None and plan.grower is not None:
            self.growth = self._growth()
            draft.growth = pointer(self.growth)

    def _growth(self) -> GrowthJob:
        """A job that grows a part of this tree, whose rows are then the pass's."""
        job, size = GrowthJob(self.parents, self.depths, self.hides), self.nodes
        self._own = torch.zeros(3, size, dtype=torch.long)
        self._own_mask = torch.zeros(size, size)
        job.nodes = job.stride = size
        job.chosen, job.own_parents, job.own_depths = (row.data_ptr() for row in self._own)
        job.own_mask = self._own_mask.data_ptr()
        self.parents, self.depths = job.own_parents, job.own_depths
        self.hides = job.own_mask
        return job

    def chosen(self, count: int) -> tuple[int, ...]:
        """Which nodes the last draft had."""
        return tuple(self._own[0, :count].tolist())
