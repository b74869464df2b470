"""NativeStep: draft, pass, logits, acceptance and the cache's rows as one call."""

from ctypes import addressof, byref, c_float, c_int64, pointer
from math import exp
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import Plan, TreeTensors
from medusa_chat.decoding.native.decoder import NativeDecoder
from medusa_chat.decoding.native.heads import NativeHeads
from medusa_chat.decoding.native.jobs import Proposal, Step, Verdict
from medusa_chat.decoding.native.library import Team
from medusa_chat.decoding.outcome import Outcome, record
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings

MOST_SHAPES = 64  # of trees that are kept ready
FIGURES = ("at_parent", "entropies", "sums", "thresholds")


class NativeStep:
    """See WholeStep: exact and typical acceptance, without top-k and top-p, of one kind of layer.

    Everything a step is worked out in stands ready, for as many nodes as a tree can have. seconds:
    how long all steps so far were in C; what a step takes beyond that is the host's.
    """

    def __init__(
        self, backbone: Any, decoder: NativeDecoder, heads: NativeHeads | None, team: Team
    ) -> None:
        """backbone: its LM head is native by now. heads: None where there are none of fp32."""
        self._cache, self._window = backbone.cache, backbone.windows[0]
        self._heads, self._team, self._decoder = heads, team, decoder
        lm = backbone.lm_head.linear
        size = lm.weight.shape[0]
        self.hidden = torch.zeros(1, decoder.hidden)
        self._logits = torch.empty(MAX_NODES, size)
        self._rows = torch.empty(MAX_NODES, decoder.hidden)
        self._noise = torch.empty(0)
        ids = [(c_int64 * MAX_NODES)() for _ in range(4)]
        self._tokens, self._own, self._path, self._places = ids
        self._figures = [(c_float * MAX_NODES)() for _ in FIGURES]
        self._shares = (c_float * MAX_NODES)()
        self._shapes: dict[int, _Shape] = {}
        self.seconds = 0.0
        self._verdict = Verdict(self._logits.data_ptr(), size=size)
        self._verdict.tokens = addressof(self._tokens)
        self._verdict.own, self._verdict.path = addressof(self._own), addressof(self._path)
        self._job = Step(None, pointer(decoder.job), pointer(self._verdict))
        self._job.lm_panels = lm.panels.data_ptr()
        self._job.lm_bias = None if lm.bias is None else lm.bias.data_ptr()
        self._job.tokens, self._job.positions = addressof(self._tokens), addressof(self._places)
        self._job.logits, self._job.last = self._logits.data_ptr(), self.hidden.data_ptr()

    def take(
        self, plan: Plan, root: int, hidden: Tensor, settings: GenerationSettings, details: bool
    ) -> Outcome | None:
        """See WholeStep."""
        start, n = self._cache.length, len(plan.tree)
        is_typical = settings.acceptance == "typical" and not settings.is_greedy
        if not self._knows(plan, start, settings, is_typical):
            return None
        shape = self._shape(plan)
        if plan.tokens is None and shape.draft is None:
            return None
        if hidden is not self.hidden:
            self.hidden.copy_(hidden)
        self._fill_draft(shape, plan, root)
        self._fill_pass(shape, n, start)
        self._fill_verdict(shape, n, start, settings, is_typical, details)
        if self._team.step(byref(self._job)):
            return None
        self.seconds += self._job.whole
        taken = self._path[: self._verdict.length]
        is_finite = bool(self._verdict.is_finite)
        if is_finite:
            self._cache.extend(len(taken))
        tokens, own = self._tokens[:n], self._own[:n]
        made = self._record(plan, tokens, own, is_typical) if details else None
        job = self._job
        return Outcome(taken, tokens, own[taken[-1]], is_finite, made, job.drafting, job.passing)

    def _knows(
        self, plan: Plan, start: int, settings: GenerationSettings, is_typical: bool
    ) -> bool:
        """Whether this rule is one of ours, and nothing of the text is out of the window."""
        is_seen = self._window is None or start + plan.tree.depth < self._window
        if settings.is_greedy or is_typical:
            return is_seen
        is_cut = settings.top_k or settings.top_p < 1
        return is_seen and settings.acceptance == "exact" and not is_cut

    def _shape(self, plan: Plan) -> "_Shape":
        key = id(plan.tensors)
        if key not in self._shapes:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            draft = self._heads.draft(plan) if self._heads else None
            self._shapes[key] = _Shape(plan, draft)
        return self._shapes[key]

    def _fill_draft(self, shape: "_Shape", plan: Plan, root: int) -> None:
        job = shape.draft if plan.tokens is None else None
        if job is None:
            assert plan.tokens is not None
            self._tokens[: len(plan.tokens)] = list(plan.tokens)
            self._job.draft = None
            return
        job.hidden, job.root, job.threads = self._job.last, root, self._team.threads
        job.tokens, job.shares = self._job.tokens, addressof(self._shares)
        self._job.draft = pointer(job)

    def _fill_pass(self, shape: "_Shape", n: int, start: int) -> None:
        job = self._decoder.job
        job.threads = self._team.threads
        self._decoder.make_room(n, start + n, job.threads)
        job.tokens, job.positions = self._job.tokens, self._job.positions
        job.mask, job.stride, job.free = shape.mask.data_ptr(), n, start
        job.rows, job.start, job.hidden = n, start, self._rows.data_ptr()

    def _fill_verdict(
        self,
        shape: "_Shape",
        n: int,
        start: int,
        settings: GenerationSettings,
        is_typical: bool,
        details: bool,
    ) -> None:
        job, tensors = self._verdict, shape.tensors
        job.parents, job.depths = tensors.parents.data_ptr(), tensors.depths.data_ptr()
        job.rows, job.place, job.threads = n, start, self._team.threads
        job.seed, job.temperature = settings.seed or 0, settings.temperature
        job.is_typical, job.deepest = is_typical, shape.depth
        job.epsilon, job.alpha = settings.posterior_threshold, settings.posterior_alpha
        if settings.temperature > 0 and not is_typical:
            if self._noise.numel() < (shape.depth + 1) * job.size:
                self._noise = torch.empty((shape.depth + 1) * job.size)
            job.noise = self._noise.data_ptr()
        for name, row in zip(FIGURES, self._figures, strict=True):
            setattr(job, name, addressof(row) if details or is_typical else None)

    def _record(self, plan: Plan, tokens: list[int], own: list[int], is_typical: bool) -> Any:
        n = len(tokens)
        found, entropies, _, thresholds = (row[:n] for row in self._figures)
        shares = self._shares[:n] if plan.tokens is None else None
        limits = thresholds if is_typical else None
        return record(plan.tree, tokens, own, [exp(x) for x in found], entropies, limits, shares)


class _Shape:
    """What stays the same for a tree: the ancestors' mask [n, n], additive, and the heads' job."""

    def __init__(self, plan: Plan, draft: Proposal | None) -> None:
        self.tensors: TreeTensors = plan.tensors
        self.depth = plan.tree.depth
        hidden = ~plan.tensors.ancestors
        self.mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
        self.draft, self._index = draft, plan.index
