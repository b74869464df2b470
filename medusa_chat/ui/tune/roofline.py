"""Appendix G's hardware model as data for the Tune tab: named GPUs, roofline, overhead."""

from dataclasses import dataclass
from typing import Any

from medusa_chat.training.hardware import (
    GPUS,
    SHAPES,
    Gpu,
    ModelShape,
    Work,
    best_nodes,
    growth,
    layer,
    overhead,
    speedup,
)
from medusa_chat.ui.page.inputs import one_of
from medusa_chat.ui.page.tree_view import short

CONTEXTS = (128, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 2, 4, 8, 16, 32, 64)
NODES = (16, 32, 64, 128, 256)
OPERATORS = (("q, k, v", 0), ("attention", 3), ("up, gate, down", 5))  # place in hardware.layer
PAPER_TOKENS, PAPER_NODES = 3.47, 64  # Vicuna-7B, Medusa-2: Table 1
SIZES = (*range(1, 32), *range(32, 257, 8))


@dataclass(frozen=True)
class Setting:
    """One machine and one model, checked."""

    gpu: Gpu
    shape: ModelShape
    context: int
    batch: int
    nodes: int


def setting_of(
    gpu: object, shape: object, context: object, batch: object, nodes: object
) -> Setting:
    """The setting that was posted. Raises UsageError with what may be chosen."""
    gpus, shapes = {g.name: g for g in GPUS}, {s.name: s for s in SHAPES}
    return Setting(
        gpus[one_of("GPU", gpu, tuple(gpus))],
        shapes[one_of("model size", shape, tuple(shapes))],
        int(one_of("context", str(context), tuple(map(str, CONTEXTS)))),
        int(one_of("batch", str(batch), tuple(map(str, BATCHES)))),
        int(one_of("nodes", str(nodes), tuple(map(str, NODES)))),
    )


def roof_view(chosen: Setting, tokens: float | None = None) -> dict[str, Any]:
    """The roofline with the operators of a plain step and of a tree step, and overhead and speedup
    over the nodes. tokens: a step at 64 nodes, of the loaded model; None: the paper's."""
    gpu, shape = chosen.gpu, chosen.shape
    constant = growth(PAPER_NODES, tokens or PAPER_TOKENS)
    best = best_nodes(shape, gpu, chosen.batch, chosen.context, constant)
    gain = _speedup(chosen, best, constant)
    return {
        "gpu": gpu.name,
        "peak": gpu.flops / 1e12,
        "bandwidth": gpu.bandwidth / 1e9,
        "ridge": short(gpu.flops / gpu.bandwidth),
        "nodes": chosen.nodes,
        "points": [
            _point(name, place, queries, chosen)
            for queries in (1, chosen.nodes)
            for name, place in OPERATORS
        ],
        "overhead": [[m, short(_overhead(chosen, m))] for m in SIZES],
        "speedup": [[m, short(_speedup(chosen, m, constant))] for m in SIZES],
        "best": {"nodes": best, "speedup": short(gain)},
        "text": summary(chosen, best, gain, _speedup(chosen, chosen.nodes, constant)),
        "assumptions": assumptions(chosen, tokens),
    }


def summary(chosen: Setting, best: int, gain: float, chosen_gain: float) -> str:
    """The model's answer in a sentence. gain, chosen_gain: speedups at `best` and as chosen."""
    where = (
        f"{chosen.shape.name} on {chosen.gpu.name}, batch {chosen.batch}, "
        f"{chosen.context:,} tokens of context"
    )
    if best == 1:
        return f"{where}: no tree pays, plain decoding is fastest."
    chosen_words = f"; {chosen.nodes} nodes give {chosen_gain:.2f}" if chosen.nodes != best else ""
    cost = _overhead(chosen, best)
    return (
        f"{where}: best near {best} nodes, {gain:.2f} times plain decoding (such a step takes "
        f"{cost:.2f} plain ones){chosen_words}."
    )


def assumptions(chosen: Setting, tokens: float | None) -> list[str]:
    """The assumptions behind the figures, one sentence each."""
    whose = "the loaded model's expectation" if tokens else "the paper's Vicuna-7B"
    gpu = chosen.gpu
    return [
        f"{gpu.name}: {gpu.flops / 1e12:g} TFLOP/s dense 16 bit, {gpu.bandwidth / 1e9:,.0f} GB/s, "
        "as the data sheet has them.",
        "16-bit values. An operator takes the longer of computing at the peak and of moving its "
        "operands once; nothing overlaps, nothing else costs (no norms, no launches, no heads). "
        "Measured steps take longer, most of all for small models.",
        f"Tokens a step grow with the logarithm of the nodes, through {tokens or PAPER_TOKENS:.2f} "
        f"at {PAPER_NODES} ({whose}).",
        "Llama's widths, as many key and value heads as query heads (Medusa, arXiv 2401.10774, "
        "appendix G).",
    ]


def _point(name: str, place: int, queries: int, chosen: Setting) -> dict[str, Any]:
    works = list(layer(chosen.shape, chosen.batch, chosen.context, queries))
    work: Work = works[place]
    seconds = work.seconds(chosen.gpu)
    return {
        "name": name,
        "queries": queries,
        "intensity": short(work.intensity),
        "tflops": short(work.flops / seconds / 1e12),
    }


def _overhead(chosen: Setting, nodes: int) -> float:
    return overhead(chosen.shape, chosen.gpu, chosen.batch, chosen.context, nodes)


def _speedup(chosen: Setting, nodes: int, constant: float) -> float:
    at = (chosen.shape, chosen.gpu, chosen.batch, chosen.context)
    return speedup(*at, nodes, constant)
