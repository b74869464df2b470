"""Plays: the course's prompts answered with one tree and one acceptance, and what came of them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import fsum
from statistics import fmean
from typing import NamedTuple

import torch

from medusa_chat.bench.harness.context import PROMPTS, BenchContext
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.bench.harness.rows import Row, row
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.runtime.worker import encode
from medusa_chat.training.conversations import read_conversations

CHUNK = 512


def questions(context: BenchContext) -> list[Question]:
    """The first questions of the file of --prompts, else the six of the race. Raises UsageError."""
    context.loaded.said = ("", [])
    if context.prompts is None:
        asked = [(text, "") for text in PROMPTS]
    else:
        rows = read_conversations(context.prompts, prompts=True)
        asked = [(found.asked[0], found.category) for found in rows if found.asked]
    if not asked:
        raise UsageError(f"{context.prompts} holds no prompt")
    turns = [([{"role": "user", "content": text}], category) for text, category in asked]
    return [Question(encode(context.loaded, turn)[0], category) for turn, category in turns]


class Variant(NamedTuple):
    """How to answer. ROOT is plain decoding."""

    settings: GenerationSettings
    tree: Tree = ROOT


AnswerFunction = Callable[[Question], Run | None]


def answer_all(
    context: BenchContext, asked: Sequence[Question], variants: Mapping[str, Variant]
) -> dict[str, list[Run]]:
    """Every question answered in every way, each answer from an empty cache."""
    return rotate(
        context, asked, {name: partial(_in, context, variant) for name, variant in variants.items()}
    )


def _in(context: BenchContext, variant: Variant, question: Question) -> Run | None:
    return answer(context, question, variant)


def rotate(
    context: BenchContext, asked: Sequence[Question], variants: Mapping[str, AnswerFunction]
) -> dict[str, list[Run]]:
    """Every question answered in every way, one after another in an order that moves on by one
    each question, so that a machine that grows faster or slower does so for all. Questions without
    room for an answer, and answers that end before the first step, are left out."""
    found: dict[str, list[Run]] = {name: [] for name in variants}
    names = list(variants)
    for number, question in enumerate(asked):
        context.progress(f"question {number + 1} of {len(asked)}")
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            one = variants[name](question)
            if one is not None and one.is_timed:
                found[name].append(one)
    if not all(found.values()):
        raise UsageError("no answer has a step: give prompts that fit, or raise --max-new-tokens")
    return found


def answer(context: BenchContext, question: Question, variant: Variant) -> Run | None:
    """One answer from an empty cache; None where the context has no room for it."""
    loaded, engine = context.loaded, context.loaded.engine
    name = "none" if len(variant.tree) == 1 else "medusa"
    nodes, most = len(variant.tree), context.max_new_tokens
    chosen = variant.settings.resolved(drafter=name, nodes=nodes, max_new_tokens=most, seed=0)
    engine.forget()
    try:
        drafter = engine.drafter(chosen, variant.tree.pruned(loaded.info.heads), details=False)
        *_, last = engine.generate(question.ids, drafter, chosen, details=False)
    except ContextError:
        return None
    assert isinstance(last, Finished)
    stats = last.stats
    stepped = (stats.acceleration_rate or 0.0) * stats.steps
    return Run(question, last.token_ids, stats.steps, stepped, stats.seconds)


def per_step(name: str, runs: Sequence[Run], command: str, note: str = "") -> Row:
    """Tokens a step over all answers; least and most of one answer."""
    whole = fsum(p.stepped for p in runs) / sum(p.steps for p in runs)
    found = row(name, [p.per_step for p in runs], "tokens/step", command, note=note)
    return {**found, "value": whole}


def speed(
    name: str, runs: Sequence[Run], plain: Sequence[Run], command: str, against: str = "plain"
) -> Row:
    """Tokens a second, against those of plain decoding, or what `plain` is, of each question."""
    base = {id(p.question): p.rate for p in plain}
    pairs = [(p.rate, base[id(p.question)]) for p in runs if id(p.question) in base]
    ours, reference_model = [a for a, _ in pairs], [b for _, b in pairs]
    return row(name, ours, "tokens/s", command, against, reference_model)


def distinct(runs: Sequence[Run], n: int = 2) -> list[float]:
    """Different n-grams over all, an answer each; those shorter than n are left out."""
    found = []
    for one in runs:
        grams = [one.tokens[i : i + n] for i in range(len(one.tokens) - n + 1)]
        if grams:
            found.append(len(set(grams)) / len(grams))
    return found


def likelihood(context: BenchContext, runs: Sequence[Run]) -> list[float]:
    """Mean log-probability of an answer's tokens under the backbone at temperature 1, in nats."""
    engine = context.loaded.engine
    backbone = engine.backbone
    found = []
    with torch.inference_mode():
        for one in runs:
            if not one.tokens:
                continue
            ids = torch.tensor([*one.question.ids, *one.tokens], device=backbone.device)
            engine.forget()
            hidden = torch.cat([backbone.run_chunk(part) for part in ids.split(CHUNK)])
            first = len(one.question.ids)
            logits = backbone.lm_head(hidden[first - 1 : -1]).float()
            chosen = logits.log_softmax(-1).gather(1, ids[first:, None])
            found.append(float(chosen.mean()))
    engine.forget()
    return found


def quality(context: BenchContext, name: str, runs: Sequence[Run], command: str) -> Iterator[Row]:
    """What can be said of answers without a judge: how probable, and how varied."""
    put = partial(row, command=command)
    yield put(f"{name}: log-likelihood", likelihood(context, runs), "nats/token")
    values = distinct(runs)
    if values:
        yield put(f"{name}: distinct-2", [fmean(values)], "share")
