"""Answers to the benchmark's questions with one tree and one acceptance, each timed as a Run."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple, TypeVar

from medusa_chat.bench.harness.context import PROMPTS, BenchContext
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.decoding.events import Finished, Told
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.runtime.reply import resolve, with_times_and_text
from medusa_chat.training.conversations import read_conversations

NO_STEP = "no answer has a decoding step: give shorter prompts, or raise --max-new-tokens"
GOLDEN = (5**0.5 - 1) / 2
T = TypeVar("T")
AnswerFunction = Callable[[Question], Run | None]


class Variant(NamedTuple):
    """One way to decode. The tree ROOT is plain decoding."""

    settings: GenerationSettings
    tree: Tree = ROOT


def asked_texts(context: BenchContext) -> list[tuple[str, str]]:
    """(text, category) of the first question of each row of --prompts, or the six own prompts; of
    many --questions, evenly spread. Raises UsageError."""
    if context.prompts is None:
        texts = [(text, "") for text in PROMPTS]
    else:
        rows = read_conversations(context.prompts, prompts=True)
        texts = [(found.asked[0], found.category) for found in rows if found.asked]
    if not texts:
        raise UsageError(f"{context.prompts} holds no prompt: give another file as --prompts")
    return spread(texts, context.questions)


def spread(values: Sequence[T], count: int | None) -> list[T]:
    """`count` of the values, evenly spread; all of them where they are fewer, or for None."""
    kept = min(count or len(values), len(values))
    return [values[place * len(values) // kept] for place in range(kept)]


def spread_order(count: int) -> list[int]:
    """0 to count - 1 so that the first few are spread evenly, however few they are."""
    return sorted(range(count), key=lambda number: (number * GOLDEN) % 1.0)


def questions(context: BenchContext) -> list[Question]:
    """`asked_texts` as questions. Raises UsageError."""
    context.loaded.said = ("", [])
    return [question_of(context, *found) for found in asked_texts(context)]


def question_of(context: BenchContext, text: str, category: str = "") -> Question:
    """A user's message as a question."""
    ids, _ = encode(context.loaded, [{"role": "user", "content": text}])
    return Question(ids, category)


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
        return _run(question, engine.generate(question.ids, drafter, settings, details=False))
    except ContextError:
        return None


def page_answer(
    context: BenchContext, question: Question, settings: GenerationSettings, keeps: bool = False
) -> Run | None:
    """As `answer`, the way the page and `generate` decode: with details, texts and the budget of
    nodes that the tuner's times allow. settings: as a user asks for them. keeps: what the cache
    holds of the prompt is not read again."""
    loaded, asked = context.loaded, replace(settings, max_new_tokens=context.max_new_tokens)
    resolved, drafter = resolve(loaded, asked)
    if not keeps:
        loaded.engine.forget()
    events = loaded.engine.generate(question.ids, drafter, resolved)
    try:
        return _run(question, with_times_and_text(loaded, events))
    except ContextError:
        return None


def _run(question: Question, events: Iterable[Told]) -> Run:
    """An answer's events as a Run."""
    *_, last = events
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
