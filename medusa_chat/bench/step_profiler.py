"""StepProfiler: times whole decoding steps at simulated fill levels of the cache."""

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from time import perf_counter

import torch

from medusa_chat.bench.step_costs import StepCosts
from medusa_chat.decoding.draft import Plan, with_chain
from medusa_chat.decoding.drafters.drafter import Drafting
from medusa_chat.decoding.drafters.lookup import Autoregressive
from medusa_chat.decoding.drafters.medusa import Medusa
from medusa_chat.decoding.drafters.tree_drafting import TreeDrafting
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import DecodeState
from medusa_chat.decoding.tree import ROOT, Tree

Clock = Callable[[], float]
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)  # nodes of the steps that are timed
SHORT, LONG = 128, 4096  # tokens in the cache
MOST_BYTES = 2**28  # bytes of a CPU's cache that measuring may write for the first time
MIN_ROUNDS, MAX_ROUNDS = 3, 40
WARM_UPS, WARM_SECONDS = 6, 0.02  # most steps and seconds of warm-up before a timed step
SLOW = 5  # multiple of the budget after which timing ends with the sizes it has
SETTINGS = GenerationSettings(drafter="medusa", seed=0)


def time_steps(
    engine: Engine, tree: Tree, budget: float = 1.0, clock: Clock = perf_counter
) -> Generator[StepCosts | None, None, None]:
    """Time steps of the first 1, 4, 8, ... nodes of `tree` behind a short and a long text.

    Yields None after every step, so that the caller can close the iterator, and StepCosts at the
    end. After a warm-up step of each size come interleaved rounds, for about `budget` seconds by
    `clock`: at least three rounds, or one where steps are slow. The minimum counts, for other work
    of the machine only adds time. The cache is as before afterwards. Without heads `tree` is a
    chain, and the text drafts it.
    """
    profiler = StepProfiler(engine, tree)
    timing = _Timing(profiler, tree, budget, clock)
    try:
        sizes = yield from timing.sizes_that_may_pay()
        yield from timing.rounds(sizes)
    finally:
        profiler.leave()
    yield timing.costs(sizes)


def warm_ups(first: float) -> int:
    """Warm-up steps before a timed one. first: seconds of the first step of its kind. In an answer
    a step follows many of its kind: a small model's sixth takes half the time of its first."""
    return min(WARM_UPS, int(WARM_SECONDS / first)) if first else 0


class _Timing:
    """The times of one run of `time_steps`; its generators yield None after every step."""

    def __init__(self, profiler: "StepProfiler", tree: Tree, budget: float, clock: Clock) -> None:
        self.profiler, self.tree, self.budget, self.clock = profiler, tree, budget, clock
        self.timed: dict[tuple[int, int], list[float]] = {}
        self.drafting: dict[int, list[float]] = {}
        self.firsts: dict[int, float] = {}
        self.began = clock()

    @property
    def spent(self) -> float:
        """Seconds of the budget."""
        return self.clock() - self.began

    def sizes_that_may_pay(self) -> Generator[None, None, list[int]]:
        """Time a first step of each size -> the sizes up to the one that could not pay even if a
        whole path were accepted, or after which time is up."""
        sizes: list[int] = []
        for nodes in [m for m in SIZES if m < len(self.tree)] + [len(self.tree)]:
            started = self.clock()
            for length in self.profiler.lengths:
                self.profiler.try_out(nodes, length)
            self.began += self.clock() - started  # answers do not take this time
            yield from self._first(nodes)
            is_dear = self.firsts[nodes] > self._most
            if sizes and (is_dear or self.spent > SLOW * self.budget):
                break
            sizes.append(nodes)
        return sizes

    def rounds(self, sizes: list[int]) -> Generator[None, None, None]:
        """Time every size at every length in turn, for as long as the budget asks."""
        for number in range(MAX_ROUNDS):
            for turn in range(len(sizes)):
                nodes = sizes[(turn + number) % len(sizes)]
                for length in self.profiler.lengths:
                    for _ in range(warm_ups(self.firsts[nodes])):
                        self.profiler.step(nodes, length)
                    self.timed.setdefault((nodes, length), []).append(self._one(nodes, length))
                    yield None
            is_enough = number + 1 >= MIN_ROUNDS and self.spent >= self.budget
            if is_enough or self.spent >= SLOW * self.budget:
                break

    def costs(self, sizes: list[int]) -> StepCosts:
        """The least of each size's times."""
        lengths = self.profiler.lengths
        rows = [tuple(min(self.timed[m, length]) for m in sizes) for length in lengths]
        drafts = tuple(min(self.drafting[m]) for m in sizes)
        return StepCosts(tuple(sizes), lengths, tuple(rows), drafts)

    @property
    def _most(self) -> float:
        """Seconds beyond which a step cannot pay, by the first size's."""
        return next(iter(self.firsts.values())) * (self.tree.depth + 1)

    def _first(self, nodes: int) -> Generator[None, None, None]:
        """A first step of a size, timed again where a small model's seems too long."""
        seconds = self._one(nodes, self.profiler.lengths[0])
        yield None
        is_short = bool(self.firsts) and next(iter(self.firsts.values())) < WARM_SECONDS
        for _ in range(MIN_ROUNDS if is_short else 0):
            if seconds <= self._most:
                break
            seconds = min(seconds, self._one(nodes, self.profiler.lengths[0]))
            yield None
        self.firsts[nodes] = seconds

    def _one(self, nodes: int, length: int) -> float:
        started = self.clock()
        self.drafting.setdefault(nodes, []).append(self.profiler.step(nodes, length))
        return self.clock() - started


class Chain(Autoregressive):
    """Drafts the same tokens at every step, each the child of the one before."""

    def __init__(self, tokens: Sequence[int], device: torch.device) -> None:
        super().__init__(device)
        if tokens:
            self._root = replace(with_chain(ROOT, 1, 0, tokens, device), sources=())

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return self._root


class StepProfiler:
    """Runs single steps of an engine between two answers, with any number of tokens in the
    cache."""

    def __init__(self, engine: Engine, tree: Tree) -> None:
        self.engine = engine
        self._tree = tree
        self._drafters: dict[int, Drafting] = {}
        self.lengths = _lengths(engine)
        cache = engine.backbone.cache
        self._length = cache.length
        most = len(tree)
        self._kept = {
            start: cache.rows(start, min(start + most, self._length))
            for start in self.lengths
            if start < self._length
        }
        cache.fill(self.lengths[-1])
        weight = torch.zeros(1) if engine.heads is None else engine.heads.bias
        self._hidden = weight.new_full((1, weight.shape[-1]), 0.1)
        self._root_id = min(5, engine.backbone.vocabulary - 1)

    def step(self, nodes: int, length: int) -> float:
        """Run a whole step as the page has it (heads, backbone, acceptance, details, the copy to
        the host, cache rows) -> the heads' seconds."""
        engine = self.engine
        engine.backbone.cache.length = length
        drafter = self._drafter(nodes)
        state = DecodeState(drafter, SETTINGS, True, self._hidden, self._root_id)
        plan = drafter.plan([self._root_id], engine.backbone.context - 1 - length)
        return engine.backend.step(state, plan).heads_seconds

    def try_out(self, nodes: int, length: int) -> None:
        """Run steps of this kind until they are as fast as they will be (StepBackend.tries)."""
        for _ in range(self.engine.backend.tries):
            self.step(nodes, length)

    def _drafter(self, nodes: int) -> Drafting:
        if nodes not in self._drafters:
            heads, backbone = self.engine.heads, self.engine.backbone
            if heads is not None:
                source = Medusa(heads, backbone.lm_head, backbone.vocabulary)
                tree = self._tree.head(nodes)
                made: Drafting = TreeDrafting(source, backbone.device, tree)
            else:
                made = Chain([self._root_id] * (nodes - 1), backbone.device)
            self._drafters[nodes] = made
        return self._drafters[nodes]

    def leave(self) -> None:
        """Restore the cache."""
        cache = self.engine.backbone.cache
        for start, kept in self._kept.items():
            cache.put_back(start, kept, self._length)
        cache.length = self._length


def _lengths(engine: Engine) -> tuple[int, ...]:
    """Tokens of a short and a long text that the context has room for, with the deepest tree."""
    backbone = engine.backbone
    longest = min(backbone.context - 16, LONG)
    if backbone.device.type == "cpu":
        row = max(backbone.cache.nbytes // backbone.cache.capacity, 1)
        longest = min(longest, max(MOST_BYTES // row, SHORT))
    return tuple(sorted({max(min(SHORT, longest), 1), max(longest, 1)}))
