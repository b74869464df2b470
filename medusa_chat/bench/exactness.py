"""Study "exactness": on real texts every drafter gives the same tokens as plain decoding.

Greedy and with a seed, in fp32 and bf16; greedy in fp32, they are also transformers' tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from medusa_chat.bench.answers import (
    Question,
    Run,
    asked_texts,
    page_run,
    parting,
    question_of,
    questions,
)
from medusa_chat.bench.context import BenchContext, read_model
from medusa_chat.bench.hf_baseline import HFBaseline, matching_baseline
from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.acceptance import gumbel
from medusa_chat.decoding.settings import GenerationSettings

PRECISIONS = ("bf16", "fp32")
DRAFTERS = ("medusa", "prompt-lookup", "auto")
MODES = {
    "greedy": GenerationSettings(temperature=0.0, seed=0),
    "sampled": GenerationSettings(temperature=0.7, seed=1),
}
NODES = 16  # where --nodes names none: a fixed tree, since a budget might draft nothing
LONG, LONG_COUNT = 2000, 20  # tokens of a long prompt at least, and how many there are at most
TIE = 1e-4  # a gap of logits below which two tokens are a tie


class Difference(NamedTuple):
    """The first divergence of an answer from plain decoding's: question and token by index. gap:
    between the two tokens' scores there (logits, with temperature and noise where a seed was used);
    None where one of the answers has ended."""

    question: int
    token: int
    gap: float | None


def exactness(context: BenchContext) -> Iterator[Row]:
    """How many answers are the same, for the file's questions and for long prompts made of them;
    the notes of the rows name each difference. In both precisions, or in that of --precision."""
    asked_for = context.request.precision
    for precision in PRECISIONS if asked_for == "auto" else (asked_for,):
        of = context
        if context.loaded.info.precision != precision:
            request = replace(context.request, precision=precision)
            of = replace(context, request=request, loaded=read_model(request, context.progress))
        kinds = {"": questions(of), f", {LONG} tokens of prompt": long_questions(of)}
        for (words, asked), (mode, settings) in product(kinds.items(), MODES.items()):
            yield from _rows(of, f"{precision}, {mode}{words}", asked, settings)


def _rows(
    context: BenchContext, name: str, asked: Sequence[Question], settings: GenerationSettings
) -> Iterator[Row]:
    """The rows of one kind of questions, in one precision and mode."""
    context.progress(name)
    runs = answers(context, asked, settings)
    plain = runs["none"]
    for drafter in drafters_of(context):
        found = differences(context, plain, runs[drafter], settings)
        steps = sum(run.steps for run in runs[drafter])
        rate = sum(run.stepped for run in runs[drafter]) / max(steps, 1)
        yield _row(f"{name}: {drafter}", found, f"{rate:.2f} tokens a step", len(plain))
    if context.loaded.info.precision != "fp32" or not settings.is_greedy:
        return
    context.progress(f"{name}: transformers")
    baseline = matching_baseline(context)
    assert baseline is not None
    found = differences_from(baseline, plain)
    yield _row(f"{name}: transformers", found, "its pass over prompt and answer", len(plain))


def answers(
    context: BenchContext, asked: Sequence[Question], settings: GenerationSettings
) -> dict[str, list[Run]]:
    """Every question answered by every drafter, "none" first, as in the page; a prompt is read once
    for all. Raises ContextError where an answer has no space."""
    found: dict[str, list[Run]] = {drafter: [] for drafter in ("none", *drafters_of(context))}
    for number, question in enumerate(asked, start=1):
        context.progress(f"question {number} of {len(asked)}")
        for drafter, runs in found.items():
            nodes = None if drafter == "none" else context.size or NODES
            wanted = replace(settings, drafter=drafter, nodes=nodes)
            runs.append(page_run(context, question, wanted, keeps=drafter != "none"))
    return found


def drafters_of(context: BenchContext) -> list[str]:
    """Those of DRAFTERS that the model has."""
    return [name for name in DRAFTERS if context.loaded.info.heads or name != "medusa"]


def differences(
    context: BenchContext,
    plain: Sequence[Run],
    drafted: Sequence[Run],
    settings: GenerationSettings,
) -> list[Difference]:
    """Where the drafted answers diverge from the plain ones."""
    found = []
    for number, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        place = parting(one.tokens, other.tokens)
        if place is None:
            continue
        gap = None
        if place < min(len(one.tokens), len(other.tokens)):
            values = scores(context, [*one.question.ids, *one.tokens[:place]], settings)
            gap = float(values[one.tokens[place]] - values[other.tokens[place]])
        found.append(Difference(number, place, gap))
    return found


@torch.inference_mode()
def scores(context: BenchContext, ids: Sequence[int], settings: GenerationSettings) -> Tensor:
    """The scores float32 [V] whose largest is the next token after `ids`."""
    logits = context.loaded.engine.peek(ids, ())[0].float().cpu()
    if settings.is_greedy:
        return logits
    noise = gumbel(settings.seed or 0, torch.tensor([len(ids)]), len(logits))[0]
    return logits / settings.scale + noise


@torch.inference_mode()
def differences_from(baseline: HFBaseline, runs: Sequence[Run]) -> list[Difference]:
    """Where greedy answers diverge from what transformers' own model finds most probable after the
    same text, at a tie or not: one pass over prompt and answer replaces those of `generate`."""
    found = []
    for number, run in enumerate(runs):
        ids = torch.tensor([[*run.question.ids, *run.tokens]], device=baseline.model.device)
        kept = len(run.tokens) + 1
        logits = baseline.model(ids, logits_to_keep=kept).logits[0].float().cpu()
        said = torch.tensor(run.tokens, dtype=torch.int64)
        gaps = logits[:-1].amax(-1) - logits[:-1].gather(1, said[:, None])[:, 0]
        if kept <= baseline.max_new_tokens:  # it ended by itself
            gaps = torch.cat([gaps, logits[-1:].amax(-1) - logits[-1, sorted(baseline.ends)].max()])
        places = gaps.nonzero()[:, 0].tolist()
        if places:
            found.append(Difference(number, places[0], float(gaps[places[0]])))
    return found


def long_questions(context: BenchContext) -> list[Question]:
    """Prompts of at least LONG tokens, or half of the context: each joins questions of the file,
    beginning with another one."""
    texts = asked_texts(context)
    least = min(LONG, context.loaded.engine.backbone.context // 2)
    found = []
    for number in range(min(LONG_COUNT, len(texts))):
        question, words, place = None, "", number
        while question is None or len(question.ids) < least:
            words = f"{words}{texts[place % len(texts)][0]}\n\n"
            question, place = question_of(context, words.strip()), place + 1
        found.append(question)
    return found


def _row(name: str, found: Sequence[Difference], note: str, answers: int) -> Row:
    """How many of the answers are the same, and where the others diverge."""
    ties = sum(one.gap is not None and abs(one.gap) < TIE for one in found)
    said = [note, f"{len(found)} differ, {ties} of them at a tie"] if found else [note]
    for one in found:
        gap = "one ends there" if one.gap is None else f"gap {one.gap:.2g}"
        said.append(f"question {one.question + 1}, token {one.token + 1}: {gap}")
    return row(name, [answers - len(found)], f"of {answers}", note="; ".join(said))
