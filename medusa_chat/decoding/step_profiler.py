"""StepProfiler: times whole decoding steps at simulated fill levels of the cache."""

from collections.abc import Callable, Generator
from time import perf_counter

import torch

from medusa_chat.decoding.acceptance import exact
from medusa_chat.decoding.drafters import Drafter
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.medusa import Medusa
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_costs import SIZES, StepCosts
from medusa_chat.decoding.step_result import DecodeState
from medusa_chat.decoding.tree import Tree

Clock = Callable[[], float]
SHORT, LONG = 128, 4096  # tokens in the cache
MOST_BYTES = 2**28  # bytes of a CPU's cache that measuring may write for the first time
MIN_ROUNDS, MAX_ROUNDS = 3, 40
WARM_UPS, WARM_SECONDS = 6, 0.02  # most steps and seconds of warm-up before a timed step
DOUBTS = 3  # times that a step is timed again whose time seems too long
SLOW = 5  # multiple of the budget after which timing ends with the sizes it has
SETTINGS = GenerationSettings(drafter="medusa", seed=0)


def time_steps(
    engine: Engine, tree: Tree, budget: float = 1.0, clock: Clock = perf_counter
) -> Generator[StepCosts | None, None, None]:
    """Time steps of the first 1, 4, 8, ... nodes of `tree` behind a short and a long text.

    Yields None after every step, so that the caller can close the iterator, and StepCosts at the
    end. After a warm-up step of each size come interleaved rounds, for about `budget` seconds by
    `clock`: at least three rounds, or one where steps are slow. The minimum counts, for other work
    of the machine only adds time. The cache is as before afterwards. The engine must have heads.
    """
    profiler = StepProfiler(engine, tree)
    timed: dict[tuple[int, int], list[float]] = {}
    drafting: dict[int, list[float]] = {}

    def time_one(nodes: int, length: int, is_warm: bool = True) -> float:
        for _ in range(warm_ups(firsts[nodes]) if is_warm else 0):
            profiler.step(nodes, length)
        started = clock()
        drafting.setdefault(nodes, []).append(profiler.step(nodes, length))
        return clock() - started

    sizes: list[int] = []
    first, firsts = 0.0, dict[int, float]()
    began = clock()
    try:
        for nodes in [m for m in SIZES if m < len(tree)] + [len(tree)]:
            started = clock()
            for length in profiler.lengths:
                profiler.try_out(nodes, length)
            began += clock() - started  # answers do not take this time: it is not of the budget
            seconds = time_one(nodes, profiler.lengths[0], False)
            yield None
            first = first or seconds
            for _ in range(DOUBTS if sizes and first < WARM_SECONDS else 0):
                if seconds <= first * (tree.depth + 1):
                    break
                seconds = min(seconds, time_one(nodes, profiler.lengths[0], False))
                yield None
            firsts[nodes] = seconds
            if sizes and (seconds > first * (tree.depth + 1) or clock() - began > SLOW * budget):
                break  # it could not pay even if a whole path were accepted; or time is up
            sizes.append(nodes)
        for number in range(MAX_ROUNDS):
            for turn in range(len(sizes)):
                nodes = sizes[(turn + number) % len(sizes)]
                for length in profiler.lengths:
                    timed.setdefault((nodes, length), []).append(time_one(nodes, length))
                    yield None
            spent = clock() - began
            if spent >= SLOW * budget or (number + 1 >= MIN_ROUNDS and spent >= budget):
                break
    finally:
        profiler.leave()
    rows = [tuple(min(timed[m, length]) for m in sizes) for length in profiler.lengths]
    drafts = tuple(min(drafting[m]) for m in sizes)
    yield StepCosts(tuple(sizes), profiler.lengths, tuple(rows), drafts)


def warm_ups(first: float) -> int:
    """Warm-up steps before a timed one. first: seconds of the first step of its kind. In an answer
    a step follows many of its kind: a small model's sixth takes half the time of its first."""
    return min(WARM_UPS, int(WARM_SECONDS / first)) if first else 0


class StepProfiler:
    """Runs single steps of an engine between two answers, with any number of tokens in the
    cache."""

    def __init__(self, engine: Engine, tree: Tree) -> None:
        assert engine.heads is not None
        self.engine = engine
        self._tree = tree
        self._drafters: dict[int, Drafter] = {}
        self.lengths = _lengths(engine)
        cache = engine.backbone.cache
        self._ids, self._length = list(engine._ids), cache.length
        most = len(tree)
        self._kept = {
            start: cache.rows(start, min(start + most, self._length))
            for start in self.lengths
            if start < self._length
        }
        cache.fill(self.lengths[-1])
        weight = engine.heads.bias
        self._hidden = weight.new_full((1, weight.shape[-1]), 0.1)
        self._root_id = min(5, engine.backbone.vocabulary - 1)
        self._root = torch.tensor([self._root_id], device=weight.device)

    def step(self, nodes: int, length: int) -> float:
        """Run a whole step as the page has it (heads, backbone, acceptance, details, the copy to
        the host, cache rows) -> the heads' seconds."""
        engine = self.engine
        engine.backbone.cache.length = length
        drafter = self._drafter(nodes)
        state = DecodeState(drafter, exact, SETTINGS, True, self._hidden, self._root_id, self._root)
        plan = drafter.plan([self._root_id], engine.backbone.context - 1 - length)
        return engine.backend.step(state, plan).heads_seconds

    def try_out(self, nodes: int, length: int) -> None:
        """Run steps of this kind until they are as fast as they will be (StepBackend.tries)."""
        for _ in range(self.engine.backend.tries):
            self.step(nodes, length)

    def _drafter(self, nodes: int) -> Drafter:
        if nodes not in self._drafters:
            backbone, heads = self.engine.backbone, self.engine.heads
            assert heads is not None
            tree, head = self._tree.head(nodes), backbone.lm_head
            self._drafters[nodes] = Medusa(heads, head, tree, backbone.vocabulary, True)
        return self._drafters[nodes]

    def leave(self) -> None:
        """Restore the cache."""
        cache = self.engine.backbone.cache
        for start, kept in self._kept.items():
            cache.put_back(start, kept, self._length)
        cache.length, self.engine._ids = self._length, self._ids


def _lengths(engine: Engine) -> tuple[int, ...]:
    """Tokens of a short and a long text that the context has room for, with the deepest tree."""
    backbone = engine.backbone
    longest = min(backbone.context - 16, LONG)
    if backbone.device.type == "cpu":
        row = max(backbone.cache.nbytes // backbone.cache.capacity, 1)
        longest = min(longest, max(MOST_BYTES // row, SHORT))
    return tuple(sorted({max(min(SHORT, longest), 1), max(longest, 1)}))
