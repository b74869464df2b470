"""Studies of single steps, which need no real text: "steps" and "context"."""

from collections.abc import Iterator
from typing import Any

from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.bench.step_costs import StepCosts
from medusa_chat.bench.step_profiler import SIZES, StepProfiler, time_steps
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.decoding.backends.native_experts import NativeStack
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.layer_forms import own_table
from medusa_chat.decoding.tree import Tree

RUNS = 3
SLOW_STEP = 20  # milliseconds; slower models with heads are not timed at sizes that cannot pay
CONTEXTS = tuple(1024 * 2**i for i in range(6))


def node_counts(context: BenchContext) -> Iterator[Row]:
    """The time of a step at each number of nodes against that of plain decoding."""
    _, by_nodes = times_by_nodes(context)
    for nodes, values in by_nodes.items():
        label = step_of(nodes)
        if not values:
            yield unmeasured(label, "ms", "it costs more than its longest path could bring")
            continue
        yield row(label, values, "ms", "step of 1 node", by_nodes[1])


def times_by_nodes(context: BenchContext) -> tuple[list[StepCosts], dict[int, list[float]]]:
    """The costs of RUNS runs, and milliseconds of a step by its nodes, each a list of RUNS; empty
    where a step costs more than its longest path could bring."""
    context.progress("steps by number of nodes")
    loaded, source = context.loaded, context.source
    measured = [
        costs
        for _ in range(RUNS)
        for costs in time_steps(loaded.engine, source, context.budget)
        if costs is not None
    ]
    first = measured[0]
    length = first.lengths[0]
    sizes = [m for m in SIZES if m <= len(source)]
    costly = [m for m in sizes if m > max(first.sizes)]
    is_slow = bool(loaded.info.heads) and 1e3 * first.at(1, length) >= SLOW_STEP
    beyond = {} if is_slow else _beyond(context, source, costly, length)
    usual = {m: [1e3 * costs.at(m, length) for costs in measured] for m in sizes}
    return measured, usual | {m: beyond.get(m, []) for m in costly}


def step_of(nodes: int) -> str:
    return f"step of {nodes} nodes" if nodes > 1 else "step of 1 node"


def _beyond(
    context: BenchContext, source: Tree, sizes: list[int], length: int
) -> dict[int, list[float]]:
    """Milliseconds of steps at sizes that cannot pay."""
    profiler = StepProfiler(context.loaded.engine, source)
    try:
        return {m: [1e3 * s for s in _times(context, profiler, m, length, RUNS)] for m in sizes}
    finally:
        profiler.leave()


def bytes_read(engine: Engine) -> int:
    """Bytes of the weights that a plain step must read, each once, without the embedding tables, of
    which it reads one row, and of experts as many as a row passes through; a table that is the LM
    head too counts."""
    model = engine.backbone.model
    read = _storages(model)
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    tables = _storages(table) | (_storages(own) if (own := own_table(model)) is not None else {})
    for place in tables.keys() - _storages(head).keys():
        del read[place]
    stacks = [m for m in model.modules() if isinstance(m, NativeStack)]
    unread = sum(m.panels.nbytes for m in stacks) * (1 - sizes(model.config.to_dict()).chosen)
    return sum(read.values()) - int(unread)


def _storages(module: Any) -> dict[int, int]:
    """Where the weights of a module lie, those in our own layout included -> bytes."""
    last = ((name.rpartition(".")[2], b) for name, b in module.named_buffers())
    panels = (b for name, b in last if name.startswith(("panels", "part")))  # parts: on a GPU
    storages = [t.untyped_storage() for t in (*module.parameters(), *panels)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def contexts(context: BenchContext) -> Iterator[Row]:
    """A plain step and a tree step after 1k to 32k tokens, as far as the context reaches."""
    context.progress("long contexts")
    loaded = context.loaded
    room = loaded.engine.backbone.context - 16
    nodes = max(loaded.info.nodes, 4)
    profiler = StepProfiler(loaded.engine, context.source)
    base: list[float] = []
    try:
        for length in CONTEXTS:
            name = f"behind {length // 1024}k tokens"
            at = min(length, room) if length <= room + 16 else 0
            if not at:
                why = f"the context holds {room + 16:,} tokens"
                yield unmeasured(f"step {name}", "ms", why)
                continue
            loaded.engine.backbone.cache.fill(at)
            plain = [1e3 * s for s in _times(context, profiler, 1, at, 5)]
            wide = [1e3 * s for s in _times(context, profiler, nodes, at, 5)]
            base = base or plain
            yield row(f"step {name}", plain, "ms", "behind 1k", base)
            yield row(f"step of {nodes} nodes {name}", wide, "ms", "its plain step", plain)
    finally:
        profiler.leave()


def _times(
    context: BenchContext, profiler: StepProfiler, nodes: int, length: int, count: int
) -> list[float]:
    """Seconds of `count` steps, after one that is not counted."""
    profiler.try_out(nodes, length)
    return [context.seconds(lambda: profiler.step(nodes, length)) for _ in range(count + 1)][1:]
