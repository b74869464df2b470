"""The parts of gpu.py about decoding steps: of 7B's and 8B's shape, as users run them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from gpu_answers import events_of, prompt_of
from gpu_part import Bench
from gpu_profile import kernel_sums

from medusa_chat.bench.random_model import SHAPES, RandomModel, load_shape
from medusa_chat.bench.step_profiler import StepProfiler
from medusa_chat.bench.steps import bytes_read
from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Step
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.auto_tree import rank_accuracies, source_tree
from medusa_chat.trees.expected_length import expected_lengths

NODES = (1, 8, 16, 32, 64)
ANSWER, FIRST = (
    48,
    10,
)  # tokens of an answer, and steps at its begin that are not timed: some record
PROFILED = 10  # steps
DRY_LENGTH = 300  # tokens before a step of a dry run, whatever they are said to be
ROOM = 128  # tokens behind the longest text: an answer and a tree
TINY = RandomModel("tiny", 64, 128, 2, 4, 2, 96, 96, own_lm=True)
MODELLED = "Vicuna-7B's published head accuracies"


def shape_of(bench: Bench, name: str, context: int) -> RandomModel:
    """The shape with this name (tiny in a dry run), with own LM heads and so long a context."""
    shape = TINY if bench.is_dry else SHAPES[name]
    return replace(shape, context=max(context, shape.context), own_lm=True)


def steps(
    bench: Bench, shape: str, precision: str, lengths: Sequence[int], shortlist: int = 0
) -> Iterator[tuple[str, Any]]:
    """Steps of a shape with random weights. shortlist: tokens that drafts are of; 0: all."""
    context = max(lengths) + ROOM
    torch.manual_seed(0)
    request = LoadRequest(device=bench.device, precision=precision, max_context=context)
    loaded = load_shape(shape_of(bench, shape, context), request)
    engine = loaded.engine
    yield "notes", loaded.info.notes
    if shortlist:
        shortlist = bench.either(shortlist, TINY.vocabulary // 2)
        is_short = engine.heads.shorten(list(range(shortlist)), engine.backbone.lm_head)
        yield "drafts are taken from the shortlist", is_short
    yield from figures(bench, engine, lengths)


def figures(
    bench: Bench, engine: Engine, lengths: Sequence[int], sizes: Sequence[int] = NODES
) -> Iterator[tuple[str, Any]]:
    """Of steps by nodes and tokens before them: see `_figures_of`. In a dry run they are a recorded
    step's, which a CPU repeats instead of replaying it."""
    if bench.is_dry:
        engine = Engine(CudaGraphStep(engine.backbone), engine.heads)
    yield "steps run by", engine.backend.name
    read = bytes_read(engine)
    yield "GB of weights that a plain step reads", read / 1e9
    for length in lengths:
        plain: dict[str, Any] = {}
        for nodes in sizes:
            found = _figures_of(bench, engine, length, nodes)
            plain = plain or found
            found |= _compared(engine, nodes, found["ms"], plain["ms"])
            if nodes == 1:
                found |= _shares(bench, engine, length, found["ms"], read)
            yield label(nodes, length), found


def label(nodes: int, length: int) -> str:
    """The name of such steps' figures."""
    return f"{nodes} nodes behind {length}"


def _figures_of(bench: Bench, engine: Engine, length: int, nodes: int) -> dict[str, Any]:
    """ms: of a step in an answer, the median, the next one queued ahead where it can be. gap: what
    of it no kernel runs in. profile: of the step alone."""
    if bench.is_dry:
        length = min(length, DRY_LENGTH)
    ms = 1e3 * median(answer_seconds(engine, length, nodes, bench.either(ANSWER, 14)))
    profiler = StepProfiler(engine, source_tree(None, len(engine.heads or ())))
    engine.backbone.cache.fill(length)
    profiler.try_out(nodes, length)
    count = bench.either(PROFILED, 2)
    found = kernel_sums(bench.device, lambda: profiler.step(nodes, length), count)
    profiler.leave()
    return {"ms": ms, "gap, ms": ms - found["kernels, ms"], "profile": found}


def answer_seconds(engine: Engine, length: int, nodes: int, count: int) -> list[float]:
    """Seconds of the steps of a greedy answer after `length` tokens, which are made up and not
    read."""
    cache, prompt = engine.backbone.cache, prompt_of(engine, length)
    engine.forget()
    cache.fill(length)
    cache.length, engine._ids = length, list(prompt)
    tree = source_tree(None, len(engine.heads or ())).head(nodes)
    events = events_of(engine, prompt, tree, count)
    seconds = [event.seconds for event in events if isinstance(event, Step)]
    return seconds[FIRST:] or seconds[-1:]


def _compared(engine: Engine, nodes: int, ms: float, plain: float) -> dict[str, Any]:
    """With a plain step: the overhead, and the speedup with modelled acceptance."""
    source = source_tree(None, len(engine.heads or ()))
    tokens = expected_lengths(source, rank_accuracies(None))[nodes - 1]
    return {
        "overhead": ms / plain,
        f"tokens a step, modelled by {MODELLED}": tokens,
        "speedup over plain, modelled": tokens * plain / ms,
    }


def _shares(
    bench: Bench, engine: Engine, length: int, ms: float, read: int
) -> dict[str, float | None]:
    """Of the bandwidth: what the weights alone need, and what they and the cache need."""
    ceiling = bench.figure("ceiling", "GB/s")
    cache = engine.backbone.cache
    whole = read + length * cache.nbytes // cache.capacity
    names = {"share of bandwidth": read, "share of bandwidth, with the cache": whole}
    return {n: count / 1e6 / ms / ceiling if ceiling else None for n, count in names.items()}
