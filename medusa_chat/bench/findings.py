"""Studies of what the paper found, on the loaded model: each is one `bench --study NAME`.

Medusa, arXiv 2401.10774: Table 3, Figures 3b, 4 and 5, section 2.3.1, appendix G.
"""

import random
from collections.abc import Iterator

from medusa_chat.bench.course import Course
from medusa_chat.bench.plays import per_step, play, quality, questions, speed
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.checkpoint import rank_accuracies, source_tree
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings
from medusa_chat.decoding.tree import Tree, cartesian, chain
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

GREEDY = GenerationSettings()
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


def ladder(course: Course) -> Iterator[Row]:
    """Table 3: what each part brings over plain decoding, with one size of tree."""
    asked, heads = questions(course), course.loaded.info.heads
    source = source_tree(course.loaded.calibration, heads)
    nodes = min(len(source), max(course.loaded.info.nodes, 8))
    shapes = {
        "heads without a tree": chain(heads),
        "dense tree": _dense(heads, nodes, random.Random(0)),
        "searched tree": source.head(nodes),
    }
    plain = play(course, asked, GREEDY)
    command = "medusa-chat bench --study ladder"
    yield speed("plain decoding", plain, plain, command)
    for name, tree in shapes.items():
        course.progress(f"ladder: {name}")
        plays = play(course, asked, GREEDY, tree)
        yield per_step(f"{name}, {len(tree)} nodes", plays, command)
        yield speed(f"{name}, {len(tree)} nodes: speed", plays, plain, command)
    why = "needs a checkpoint of train --method medusa-2: name it with --checkpoint"
    yield unmeasured("Medusa-2", "tokens/step", why)


def trees(course: Course) -> Iterator[Row]:
    """Figure 4: trees searched from the accuracies against random dense ones, by size."""
    asked, heads = questions(course), course.loaded.info.heads
    accuracies = rank_accuracies(course.loaded.calibration)[:heads]
    plain = play(course, asked, GREEDY)
    command, dice = "medusa-chat bench --study trees", random.Random(0)
    for nodes in SIZES:
        course.progress(f"trees: {nodes} nodes")
        sparse = search_tree(accuracies, min(nodes, MAX_NODES))
        shapes = [(f"searched, {len(sparse)} nodes", sparse)]
        for _ in range(DENSE_EACH):
            dense = _dense(heads, nodes, dice)
            shapes.append((f"dense {dense_name(dense)}, {len(dense)} nodes", dense))
        for name, tree in dict(shapes).items():
            plays = play(course, asked, GREEDY, tree)
            yield per_step(name, plays, command)
            yield speed(f"{name}: speed", plays, plain, command)


def _dense(heads: int, nodes: int, dice: random.Random) -> Tree:
    """A product of the first predictions of some heads, of `nodes` nodes at most: the largest of
    some drawn at random."""
    drawn = []
    for _ in range(64):
        widths: list[int] = []
        for _ in range(dice.randint(1, heads)):
            widths.append(dice.randint(1, 4))
            if len(cartesian(*widths)) > nodes:
                widths.pop()
                break
        if widths:
            drawn.append(cartesian(*widths))
    return max(drawn, key=lambda tree: (len(tree), dice.random()))


def dense_name(tree: Tree) -> str:
    """The widths of a dense tree: 4x2x1."""
    counts = [tree.depths.count(depth) for depth in range(tree.depth + 1)]
    return "x".join(str(b // a) for a, b in zip(counts, counts[1:], strict=False))


def thresholds(course: Course) -> Iterator[Row]:
    """Figure 5: epsilon against speed and quality at temperature 0.7, delta = sqrt(epsilon), with
    random sampling and greedy decoding beside them."""
    asked, command = questions(course), "medusa-chat bench --study thresholds"
    tree = _auto(course)
    warm = GenerationSettings(temperature=WARM)
    for name, settings in (("plain, greedy", GREEDY), ("plain, random sampling", warm)):
        plays = play(course, asked, settings)
        yield from quality(course, name, plays, command)
    for epsilon in EPSILONS:
        course.progress(f"thresholds: epsilon {epsilon}")
        settings = warm.resolved(
            acceptance="typical-sampled",
            posterior_threshold=epsilon,
            posterior_alpha=epsilon**0.5,
        )
        plays, name = play(course, asked, settings, tree), f"epsilon {epsilon}"
        yield per_step(name, plays, command)
        yield from quality(course, name, plays, command)


def temperatures(course: Course) -> Iterator[Row]:
    """Section 2.3.1: tokens a step by temperature, for every acceptance."""
    asked, command = questions(course), "medusa-chat bench --study temperatures"
    tree = _auto(course)
    for acceptance in ACCEPTANCES:
        for temperature in TEMPERATURES:
            course.progress(f"temperatures: {acceptance} at {temperature}")
            settings = GenerationSettings(acceptance=acceptance, temperature=temperature)
            plays = play(course, asked, settings, tree)
            yield per_step(f"{acceptance} at {temperature}", plays, command)


def categories(course: Course) -> Iterator[Row]:
    """Figure 3b: the speedup by kind of question, of a file whose rows name one."""
    asked, command = questions(course), "medusa-chat bench --study categories --prompts FILE"
    kinds = sorted({question.category for question in asked if question.category})
    if not kinds:
        why = "needs --prompts FILE with a category in each row, as MT-Bench has"
        yield unmeasured("speedup by category", "tokens/s", why)
        return
    tree = _auto(course)
    for kind in kinds:
        course.progress(f"categories: {kind}")
        chosen = [question for question in asked if question.category == kind]
        plain, plays = play(course, chosen, GREEDY), play(course, chosen, GREEDY, tree)
        yield per_step(kind, plays, command)
        yield speed(f"{kind}: speed", plays, plain, command)


def hardware(course: Course) -> Iterator[Row]:
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


def _auto(course: Course) -> Tree:
    loaded = course.loaded
    return source_tree(loaded.calibration, loaded.info.heads).head(loaded.info.nodes)
