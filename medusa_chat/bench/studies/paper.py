"""Studies of what the paper found, on the loaded model: each is one `bench --study NAME`.

Medusa, arXiv 2401.10774: Table 3, Figures 3b, 4 and 5, section 2.3.1, appendix G.
"""

import random
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from operator import mul

from medusa_chat.bench.harness.answers import (
    Answerer,
    Way,
    answer,
    per_step,
    play,
    quality,
    questions,
    rotate,
    speed,
)
from medusa_chat.bench.harness.context import BenchContext, other
from medusa_chat.bench.harness.rows import Row, row, unmeasured
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree, cartesian, chain
from medusa_chat.training.hardware import (
    GPUS,
    SHAPES,
    attention,
    best_nodes,
    growth,
    linear,
    speedup,
)
from medusa_chat.training.tree_search import search_tree
from medusa_chat.trees.auto_tree import rank_accuracies, source_tree

GREEDY = GenerationSettings()
PLAIN = "plain decoding"
SIZES = (8, 16, 32, 64, 128, 256)
DENSE_EACH = 3  # random dense trees of about each size
EPSILONS = (0.01, 0.02, 0.05, 0.09, 0.15, 0.2, 0.25)  # Figure 5; delta is the root of each
WARM = 0.7
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
ACCEPTANCES = ("exact", "typical", "typical-sampled")
QUERIES = (1, 16, 64)
BATCHES = (1, 8, 32)
LENGTHS = (128, 1024, 8192)
TABLE_1 = growth(64, 3.47)  # Vicuna-7B: 3.47 tokens a step with 64 nodes


def ladder(course: BenchContext) -> Iterator[Row]:
    """Table 3: what each part brings over plain decoding, with one size of tree."""
    heads = course.loaded.info.heads
    source = source_tree(course.loaded.calibration, heads)
    nodes = min(len(source), max(course.loaded.info.nodes, 8))
    shapes = {
        "heads without a tree": chain(heads),
        "dense tree": _dense(heads, nodes, random.Random(0)),
        "searched tree": source.head(nodes),
    }
    named = {f"{name}, {len(tree)} nodes": tree for name, tree in shapes.items()}
    command = "medusa-chat bench --study ladder"
    if course.medusa_2 is None:
        yield from _against_plain(course, named, command)
        why = "needs --medusa-2 DIR, what train --method medusa-2 made of this backbone"
        yield unmeasured("Medusa-2", "tokens/step", why)
        return
    joint = other(course, course.medusa_2)
    source = source_tree(joint.loaded.calibration, joint.loaded.info.heads)
    tree = source.head(min(nodes, len(source)))
    name = f"Medusa-2, searched tree, {len(tree)} nodes"
    way = partial(answer, joint, way=Way(GREEDY, tree))
    yield from _against_plain(course, named, command, {name: way})


def trees(course: BenchContext) -> Iterator[Row]:
    """Figure 4: trees searched from the accuracies against random dense ones, by size."""
    heads, dice = course.loaded.info.heads, random.Random(0)
    accuracies = rank_accuracies(course.loaded.calibration)[:heads]
    named: dict[str, Tree] = {}
    for nodes in SIZES:
        sparse = search_tree(accuracies, min(nodes, MAX_NODES))
        named[f"searched, {len(sparse)} nodes"] = sparse
        for _ in range(DENSE_EACH):
            dense = _dense(heads, nodes, dice)
            named[f"dense {dense_name(dense)}, {len(dense)} nodes"] = dense
    yield from _against_plain(course, named, "medusa-chat bench --study trees")


def _against_plain(
    course: BenchContext,
    named: dict[str, Tree],
    command: str,
    more: Mapping[str, Answerer] | None = None,
) -> Iterator[Row]:
    """Tokens a step and speed of each tree, greedy, and of what else answers."""
    shapes = {PLAIN: ROOT} | named
    ways: dict[str, Answerer] = {
        name: partial(answer, course, way=Way(GREEDY, tree)) for name, tree in shapes.items()
    }
    plays = rotate(course, questions(course), ways | dict(more or {}))
    yield speed(PLAIN, plays[PLAIN], plays[PLAIN], command)
    for name in [*named, *(more or {})]:
        yield per_step(name, plays[name], command)
        yield speed(f"{name}: speed", plays[name], plays[PLAIN], command)


def _dense(heads: int, nodes: int, dice: random.Random) -> Tree:
    """A product of the first predictions of some heads, of `nodes` nodes at most: the largest of
    some drawn at random."""
    drawn: list[Tree] = []
    while not drawn:
        for _ in range(64):
            widths = [dice.randint(1, 4) for _ in range(dice.randint(1, heads))]
            if 1 + sum(accumulate(widths, mul)) <= nodes:
                drawn.append(cartesian(*widths))
    return max(drawn, key=len)


def dense_name(tree: Tree) -> str:
    """The widths of a dense tree: 4x2x1."""
    counts = [tree.depths.count(depth) for depth in range(tree.depth + 1)]
    return "x".join(str(b // a) for a, b in zip(counts, counts[1:], strict=False))


def thresholds(course: BenchContext) -> Iterator[Row]:
    """Figure 5: epsilon against speed and quality at temperature 0.7, delta = sqrt(epsilon), with
    random sampling and greedy decoding beside them."""
    command, tree = "medusa-chat bench --study thresholds", auto(course)
    warm = GenerationSettings(temperature=WARM)
    ways = {"plain, greedy": Way(GREEDY), "plain, random sampling": Way(warm)}
    for epsilon in EPSILONS:
        settings = warm.resolved(
            acceptance="typical-sampled",
            posterior_threshold=epsilon,
            posterior_alpha=epsilon**0.5,
        )
        ways[f"epsilon {epsilon}"] = Way(settings, tree)
    for name, plays in play(course, questions(course), ways).items():
        if len(ways[name].tree) > 1:
            yield per_step(name, plays, command)
        yield from quality(course, name, plays, command)


def temperatures(course: BenchContext) -> Iterator[Row]:
    """Section 2.3.1: tokens a step by temperature, for every acceptance."""
    command, tree = "medusa-chat bench --study temperatures", auto(course)
    ways = {
        f"{acceptance} at {t}": Way(GenerationSettings(acceptance=acceptance, temperature=t), tree)
        for acceptance in ACCEPTANCES
        for t in TEMPERATURES
    }
    for name, plays in play(course, questions(course), ways).items():
        yield per_step(name, plays, command)


def categories(course: BenchContext) -> Iterator[Row]:
    """Figure 3b: the speedup by kind of question, of a file whose rows name one."""
    command = "medusa-chat bench --study categories --prompts FILE"
    asked = [question for question in questions(course) if question.category]
    if not asked:
        why = "needs --prompts FILE with a category in each row, as MT-Bench has"
        yield unmeasured("speedup by category", "tokens/s", why)
        return
    plays = play(course, asked, {PLAIN: Way(GREEDY), "medusa": Way(GREEDY, auto(course))})
    for kind in sorted({question.category for question in asked}):
        chosen = [one for one in plays["medusa"] if one.question.category == kind]
        if chosen:
            yield per_step(kind, chosen, command)
            yield speed(f"{kind}: speed", chosen, plays[PLAIN], command)


def hardware(course: BenchContext) -> Iterator[Row]:
    """Appendix G: the intensities of Tables 6 to 8, and what they make of a tree on named GPUs.
    A model of it, nothing is timed."""
    command, large, small = "medusa-chat bench --study hardware", SHAPES[2], SHAPES[0]
    for q in QUERIES:
        for length in LENGTHS:
            name, work = f"attention, {length} long, q {q}", attention(16, q, length, 128)
            yield row(name, [work.intensity], "FLOP/byte", command)
        for batch in BATCHES:
            work = linear(batch * q, large.hidden, large.inner)
            yield row(f"33B linear, batch {batch}, q {q}", [work.intensity], "FLOP/byte", command)
    for gpu in GPUS:
        nodes = best_nodes(small, gpu, 1, 1024, TABLE_1)
        gain = speedup(small, gpu, 1, 1024, nodes, TABLE_1)
        note = f"MODEL: {nodes} nodes, batch 1, 1,024 tokens; 3.47 tokens a step with 64 nodes"
        yield row(f"7B on {gpu.name}", [gain], "x", command, "plain", [1.0], note)


def auto(course: BenchContext) -> Tree:
    """The tree that `--tree auto` decodes with."""
    loaded = course.loaded
    return source_tree(loaded.calibration, loaded.info.heads).head(loaded.info.nodes)
