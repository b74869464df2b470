"""Studies that repeat the paper's tables and figures on the loaded model.

Medusa, arXiv 2401.10774: Table 3, Figures 3b, 4 and 5, section 2.3.1, appendix G.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import mul

import torch
from paper_context import PaperContext, with_checkpoint

from medusa_chat.bench import answers
from medusa_chat.bench.answers import (
    AnswerFunction,
    Run,
    Variant,
    answer,
    per_step,
    questions,
    speed,
)
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.decoding.settings import MAX_NODES, GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.training import hardware as hardware_model
from medusa_chat.training.hardware import GPUS, SHAPES, attention, linear
from medusa_chat.training.packed_model import states_of
from medusa_chat.trees.auto_tree import rank_accuracies
from medusa_chat.trees.expected_length import likeliest
from medusa_chat.trees.shapes import cartesian, chain

GREEDY = GenerationSettings()
PLAIN = "plain decoding"
SIZES = (8, 16, 32, 64, 128, 256)
DENSE_EACH = 3  # random dense trees of each size
EPSILONS = (0.01, 0.02, 0.05, 0.09, 0.15, 0.2, 0.25)  # Figure 5; delta is the square root of each
WARM = 0.7
TEMPERATURES = (0.0, 0.3, 0.5, 0.7, 1.0)
ACCEPTANCES = ("exact", "typical", "typical-sampled")
QUERIES = (1, 16, 64)
BATCHES = (1, 8, 32)
LENGTHS = (128, 1024, 8192)
TABLE_1 = hardware_model.growth(64, 3.47)  # Vicuna-7B: 3.47 tokens a step with 64 nodes


def ladder(context: PaperContext) -> Iterator[Row]:
    """Table 3: what each part of Medusa brings over plain decoding, with trees of one size."""
    heads = context.loaded.info.heads
    source = context.source
    nodes = min(len(source), context.size or max(context.loaded.info.nodes, 8))
    shapes = {
        "heads without a tree": chain(heads),
        "dense tree": _random_dense_tree(heads, nodes, random.Random(0)),
        "searched tree": source.head(nodes),
    }
    named = {f"{name}, {len(tree)} nodes": tree for name, tree in shapes.items()}
    if context.medusa_2 is None:
        yield from _against_plain(context, named)
        why = "needs --medusa-2 DIR, a checkpoint of train --method medusa-2 for this backbone"
        yield unmeasured("Medusa-2", "tokens/step", why)
        return
    joint = with_checkpoint(context, context.medusa_2)
    tree = joint.source.head(min(nodes, len(joint.source)))
    name = f"Medusa-2, searched tree, {len(tree)} nodes"
    variant = partial(answer, joint, variant=Variant(GREEDY, tree))
    yield from _against_plain(context, named, {name: variant})


def trees(context: PaperContext) -> Iterator[Row]:
    """Figure 4: trees searched by the accuracies against random dense trees, by size."""
    heads, generator = context.loaded.info.heads, random.Random(0)
    accuracies = rank_accuracies(context.loaded.calibration)[:heads]
    named: dict[str, Tree] = {}
    for nodes in SIZES:
        sparse = likeliest(accuracies, min(nodes, MAX_NODES))
        named[f"searched, {len(sparse)} nodes"] = sparse
        for _ in range(DENSE_EACH):
            dense = _random_dense_tree(heads, nodes, generator)
            named[f"dense {dense_widths(dense)}, {len(dense)} nodes"] = dense
    yield from _against_plain(context, named)


def head_count(context: PaperContext) -> Iterator[Row]:
    """2.2.3: the first 1, 2, ... of the checkpoint's heads, each number with the tree of --nodes
    nodes that its accuracies give."""
    accuracies = rank_accuracies(context.loaded.calibration)[: context.loaded.info.heads]
    nodes = context.size or max(context.loaded.info.nodes, 8)
    named: dict[str, Tree] = {}
    for count in range(1, len(accuracies) + 1):
        tree = likeliest(accuracies[:count], nodes)
        named[f"{count} head{'s' * (count > 1)}, {len(tree)} nodes"] = tree
    yield from _against_plain(context, named)


def _against_plain(
    context: PaperContext, named: dict[str, Tree], more: Mapping[str, AnswerFunction] | None = None
) -> Iterator[Row]:
    """Tokens a step and speed of each tree, greedy, and of the functions in `more`."""
    shapes = {PLAIN: ROOT} | named
    variants: dict[str, AnswerFunction] = {
        name: partial(answer, context, variant=Variant(GREEDY, tree))
        for name, tree in shapes.items()
    }
    runs = answers.rotate(context, questions(context), variants | dict(more or {}))
    yield speed(PLAIN, runs[PLAIN], runs[PLAIN])
    for name in [*named, *(more or {})]:
        yield per_step(name, runs[name])
        yield speed(f"{name}: speed", runs[name], runs[PLAIN])


def _random_dense_tree(heads: int, nodes: int, generator: random.Random) -> Tree:
    """The largest of some random products of the first predictions of some heads, with at most
    `nodes` nodes."""
    drawn: list[Tree] = []
    while not drawn:
        for _ in range(64):
            widths = [generator.randint(1, 4) for _ in range(generator.randint(1, heads))]
            if 1 + sum(accumulate(widths, mul)) <= nodes:
                drawn.append(cartesian(*widths))
    return max(drawn, key=len)


def dense_widths(tree: Tree) -> str:
    """The widths of a dense tree, as 4x2x1."""
    counts = [tree.depths.count(depth) for depth in range(tree.depth + 1)]
    return "x".join(str(b // a) for a, b in zip(counts, counts[1:], strict=False))


def thresholds(context: PaperContext) -> Iterator[Row]:
    """Figure 5: tokens a step and how probable the texts are by epsilon, at temperature 0.7 with
    delta = sqrt(epsilon), against random sampling and greedy decoding."""
    tree = context.chosen_tree
    warm = GenerationSettings(temperature=WARM)
    variants = {"plain, greedy": Variant(GREEDY), "plain, random sampling": Variant(warm)}
    for epsilon in EPSILONS:
        settings = replace(
            warm,
            acceptance="typical-sampled",
            posterior_threshold=epsilon,
            posterior_alpha=epsilon**0.5,
        )
        variants[f"epsilon {epsilon}"] = Variant(settings, tree)
    for name, runs in answers.answer_all(context, questions(context), variants).items():
        if len(variants[name].tree) > 1:
            yield per_step(name, runs)
        yield row(f"{name}: log-likelihood", likelihood(context, runs), "nats/token")


def temperatures(context: PaperContext) -> Iterator[Row]:
    """Section 2.3.1: tokens a step by temperature and acceptance."""
    tree = context.chosen_tree
    variants = {
        f"{acceptance} at {t}": Variant(
            GenerationSettings(acceptance=acceptance, temperature=t), tree
        )
        for acceptance in ACCEPTANCES
        for t in TEMPERATURES
    }
    for name, runs in answers.answer_all(context, questions(context), variants).items():
        yield per_step(name, runs)


def categories(context: PaperContext) -> Iterator[Row]:
    """Figure 3b: the speedup by category of question, for a file whose rows have one."""
    asked = [question for question in questions(context) if question.category]
    if not asked:
        why = "needs --prompts FILE with a category in each row, as MT-Bench has"
        yield unmeasured("speedup by category", "tokens/s", why)
        return
    variants = {PLAIN: Variant(GREEDY), "medusa": Variant(GREEDY, context.chosen_tree)}
    runs = answers.answer_all(context, asked, variants)
    for kind in sorted({question.category for question in asked}):
        chosen = [one for one in runs["medusa"] if one.question.category == kind]
        if chosen:
            yield per_step(kind, chosen)
            yield speed(f"{kind}: speed", chosen, runs[PLAIN])


def hardware(_: PaperContext) -> Iterator[Row]:
    """Appendix G: the arithmetic intensities of Tables 6 to 8, and the best tree that the hardware
    model gives for named GPUs. Nothing is timed."""
    large, small = SHAPES[2], SHAPES[0]
    for q in QUERIES:
        for length in LENGTHS:
            name, work = f"attention, {length} long, q {q}", attention(16, q, length, 128)
            yield row(name, [work.intensity], "FLOP/byte")
        for batch in BATCHES:
            work = linear(batch * q, large.hidden, large.inner)
            yield row(f"33B linear, batch {batch}, q {q}", [work.intensity], "FLOP/byte")
    for gpu in GPUS:
        nodes = hardware_model.best_nodes(small, gpu, 1, 1024, TABLE_1)
        gain = hardware_model.speedup(small, gpu, 1, 1024, nodes, TABLE_1)
        note = f"MODEL: {nodes} nodes, batch 1, 1,024 tokens; 3.47 tokens a step with 64 nodes"
        yield row(f"7B on {gpu.name}", [gain], "x", "plain", [1.0], note)


def likelihood(context: PaperContext, runs: Sequence[Run]) -> list[float]:
    """For each answer the mean log-probability of its tokens under the backbone at temperature 1,
    in nats."""
    engine = context.loaded.engine
    found = []
    with torch.inference_mode():
        for run in runs:
            if not run.tokens:
                continue
            first = len(run.question.ids)
            ids = torch.tensor([*run.question.ids, *run.tokens], device=engine.backbone.device)
            logits = engine.backbone.lm_head(states_of(engine, ids)[first - 1 : -1]).float()
            chosen = logits.log_softmax(-1).gather(1, ids[first:, None])
            found.append(float(chosen.mean()))
    return found
