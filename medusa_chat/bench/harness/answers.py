"""Answers to the benchmark's questions with one tree and one acceptance, each timed as a Run."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from medusa_chat.bench.harness.context import PROMPTS, BenchContext
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.decoding.events import Finished
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.training.conversations import read_conversations

NO_STEP = "no answer has a decoding step: give shorter prompts, or raise --max-new-tokens"
AnswerFunction = Callable[[Question], Run | None]


class Variant(NamedTuple):
    """One way to decode. The tree ROOT is plain decoding."""

    settings: GenerationSettings
    tree: Tree = ROOT


def questions(context: BenchContext) -> list[Question]:
    """The first question of each row of --prompts, or the six own prompts. Raises UsageError."""
    context.loaded.said = ("", [])
    if context.prompts is None:
        texts = [(text, "") for text in PROMPTS]
    else:
        rows = read_conversations(context.prompts, prompts=True)
        texts = [(found.asked[0], found.category) for found in rows if found.asked]
    if not texts:
        raise UsageError(f"{context.prompts} holds no prompt: give another file as --prompts")
    return [
        Question(encode(context.loaded, [{"role": "user", "content": text}])[0], category)
        for text, category in texts
    ]


def answer(context: BenchContext, question: Question, variant: Variant) -> Run | None:
    """One answer from an empty cache; None where the context has no space for it."""
    loaded, engine = context.loaded, context.loaded.engine
    drafter_name = "none" if len(variant.tree) == 1 else "medusa"
    nodes, most = len(variant.tree), context.max_new_tokens
    settings = replace(
        variant.settings, drafter=drafter_name, nodes=nodes, max_new_tokens=most, seed=0
    )
    engine.forget()
    try:
        drafter = engine.drafter(settings, variant.tree.pruned(loaded.info.heads), details=False)
        *_, last = engine.generate(question.ids, drafter, settings, details=False)
    except ContextError:
        return None
    assert isinstance(last, Finished)
    stats = last.stats
    return Run(question, last.token_ids, stats.steps, stats.emitted, stats.seconds)


def answer_all(
    context: BenchContext, asked: Sequence[Question], variants: Mapping[str, Variant]
) -> dict[str, list[Run]]:
    """Every question answered in every variant, each answer from an empty cache."""
    functions = {name: partial(answer, context, variant=v) for name, v in variants.items()}
    return rotate(context, asked, functions)


def rotate(
    context: BenchContext, asked: Sequence[Question], functions: Mapping[str, AnswerFunction]
) -> dict[str, list[Run]]:
    """Every question answered by every function, one after another. The first one changes with
    every question, so that a machine that becomes faster or slower does so for all. Questions
    without space for an answer, and answers without a step, are left out. Raises UsageError where a
    function has no answer left."""
    found: dict[str, list[Run]] = {name: [] for name in functions}
    names = list(functions)
    for number, question in enumerate(asked):
        context.progress(f"question {number + 1} of {len(asked)}")
        for turn in range(len(names)):
            name = names[(turn + number) % len(names)]
            run = functions[name](question)
            if run is not None and run.is_timed:
                found[name].append(run)
    if not all(found.values()):
        raise UsageError(NO_STEP)
    return found
