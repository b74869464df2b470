"""Question and Run: the prompts of a benchmark and their timed answers."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import fsum
from pathlib import Path
from typing import NamedTuple, TypeVar

from medusa_chat.bench.context import PROMPTS, BenchContext
from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.events import Finished, Told
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.runtime.prompt import encode
from medusa_chat.runtime.reply import resolve
from medusa_chat.training.conversations import Conversation, read_conversations

NO_STEP = "no answer has a decoding step: give shorter prompts, or raise --max-new-tokens"
T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """A prompt as token ids, and its category, "" where the file names none."""

    ids: list[int]
    category: str


@dataclass(frozen=True)
class Run:
    """One timed answer. tokens: ids. steps: passes of the backbone after the prefill. stepped:
    tokens from the steps, the end token included. seconds: of the steps. busy: of these without
    what other programs took of the processor; None where unknown."""

    question: Question
    tokens: tuple[int, ...]
    steps: int
    stepped: float
    seconds: float
    busy: float | None = None

    @property
    def is_timed(self) -> bool:
        """Whether there was a step: an answer may end with the prefill's token."""
        return self.steps > 0 and self.seconds > 0

    @property
    def per_step(self) -> float:
        """Tokens per step, the acceleration rate of this answer."""
        return self.stepped / self.steps

    @property
    def rate(self) -> float:
        """Tokens per second of decoding."""
        return self.stepped / self.seconds


AnswerFunction = Callable[[Question], Run]  # raises ContextError without space for an answer


class Variant(NamedTuple):
    """One way to decode. The tree ROOT is plain decoding."""

    settings: GenerationSettings
    tree: Tree = ROOT


def asked_texts(context: BenchContext) -> list[tuple[str, str]]:
    """(text, category) of the first question of each row of --prompts, or of our own six prompts;
    of these --questions, evenly spread. Raises UsageError."""
    if context.prompts is None:
        return spread([(text, "") for text in PROMPTS], context.questions)
    return [(row.asked[0], row.category) for row in asked_rows(context, context.prompts)]


def asked_rows(context: BenchContext, file: Path) -> list[Conversation]:
    """--questions rows of a file of questions, evenly spread. Raises UsageError."""
    read = read_conversations(file, prompts=True)
    for note in read.notes:
        context.progress(note)
    rows = read.conversations
    if not rows:
        raise UsageError(f"{file} has no prompt: give another file as --prompts")
    return spread(rows, context.questions)


def spread(values: Sequence[T], count: int | None) -> list[T]:
    """`count` of the values, evenly spread; all where there are fewer, or for None."""
    kept = min(count or len(values), len(values))
    return [values[place * len(values) // kept] for place in range(kept)]


def rotated(values: Sequence[T], number: int) -> list[T]:
    """The values rotated to begin with the one at this index."""
    at = number % len(values)
    return [*values[at:], *values[:at]]


def questions(context: BenchContext) -> list[Question]:
    """`asked_texts` as questions. Raises UsageError."""
    context.loaded.said = ()
    return [question_of(context, *found) for found in asked_texts(context)]


def question_of(context: BenchContext, text: str, category: str = "") -> Question:
    """A user's message as a question; the text alone where the model has no chat template."""
    has_template = context.loaded.tokenizer.chat_template
    asked = [{"role": "user", "content": text}] if has_template else text
    return Question(encode(context.loaded, asked).ids, category)


def answer(context: BenchContext, question: Question, variant: Variant) -> Run:
    """One answer from an empty cache. Raises ContextError without space for it."""
    return run_of(question, events_of(context, question, variant))


def events_of(
    context: BenchContext, question: Question, variant: Variant, details: bool = False
) -> list[Told]:
    """The events of `answer`. details: whether its steps record their drafts."""
    loaded, engine = context.loaded, context.loaded.engine
    drafter_name = "none" if len(variant.tree) == 1 else "medusa"
    nodes, most = len(variant.tree), context.max_new_tokens
    settings = replace(
        variant.settings, drafter=drafter_name, nodes=nodes, max_new_tokens=most, seed=0
    )
    engine.forget()
    drafter = engine.drafter(settings, variant.tree.pruned(loaded.info.heads))
    return list(engine.generate(question.ids, drafter, settings, details))


def page_run(
    context: BenchContext, question: Question, settings: GenerationSettings, keeps: bool = False
) -> Run:
    """As `answer`, the way the page and `generate` decode: with details, texts and the
    budget. settings: as a user asks for them. keeps: what the cache holds of the prompt is not read
    again. Raises ContextError without space for an answer."""
    loaded, asked = context.loaded, replace(settings, max_new_tokens=context.max_new_tokens)
    resolved, drafter = resolve(loaded, asked)
    if not keeps:
        loaded.engine.forget()
    events = loaded.engine.generate(question.ids, drafter, resolved, texts=loaded.texts)
    return run_of(question, events)


def run_of(question: Question, events: Iterable[Told]) -> Run:
    """An answer's events as a Run."""
    *_, last = events
    assert isinstance(last, Finished)
    stats = last.stats
    found = question, last.token_ids, stats.steps, stats.emitted, stats.seconds
    return Run(*found, stats.busy_seconds)


def parting(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The index of the first token that differs; None where there is none."""
    pairs = enumerate(zip_longest(one, other))
    return next((place for place, (a, b) in pairs if a != b), None)


def answer_all(
    context: BenchContext, asked: Sequence[Question], variants: Mapping[str, Variant]
) -> dict[str, list[Run]]:
    """Every question answered in every variant, each answer from an empty cache."""
    functions = {name: partial(answer, context, variant=v) for name, v in variants.items()}
    return rotate(context, asked, functions)


def fastest_of_rounds(
    context: BenchContext,
    asked: Sequence[Question],
    functions: Mapping[str, AnswerFunction],
    rounds: int,
) -> dict[str, list[Run]]:
    """The fastest of several rounds of `rotate` for every answer; all have the same tokens."""
    all_runs: dict[str, list[Run]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, runs in rotate(context, asked, functions).items():
            all_runs[name] += runs
    return {name: list(fastest(runs).values()) for name, runs in all_runs.items()}


def fastest(runs: Iterable[Run]) -> dict[int, Run]:
    """The fastest timed answer to each question, by the question's id."""
    slowest_first = sorted((run for run in runs if run.is_timed), key=lambda run: -run.seconds)
    return {id(run.question): run for run in slowest_first}


def rotate(
    context: BenchContext, asked: Sequence[Question], functions: Mapping[str, AnswerFunction]
) -> dict[str, list[Run]]:
    """Every question answered by every function in turn. The first function changes with every
    question, so that a machine that becomes faster or slower does so for all. Questions without
    space for an answer, and answers without a step, are left out. Raises UsageError where a
    function has no answer left."""
    answered: dict[str, list[Run]] = {name: [] for name in functions}
    for number, question in enumerate(asked):
        context.progress(f"question {number + 1} of {len(asked)}")
        for name in rotated(list(functions), number):
            with suppress(ContextError):
                run = functions[name](question)
                if run.is_timed:
                    answered[name].append(run)
    if not all(answered.values()):
        raise UsageError(NO_STEP)
    return answered


def mean_step(runs: Sequence[Run]) -> float:
    """Seconds of a step of all answers together."""
    return fsum(run.seconds for run in runs) / sum(run.steps for run in runs)


def rate(runs: Sequence[Run]) -> float:
    """Tokens per second over all answers."""
    return fsum(run.stepped for run in runs) / fsum(run.seconds for run in runs)


def per_step(name: str, runs: Sequence[Run], note: str = "") -> Row:
    """Tokens per step over all answers; minimum and maximum are of single answers."""
    mean = fsum(run.stepped for run in runs) / sum(run.steps for run in runs)
    return row(name, [run.per_step for run in runs], "tokens/step", note=note, value=mean)


def speed(name: str, runs: Sequence[Run], baseline: Sequence[Run], against: str = "plain") -> Row:
    """Tokens per second, and the ratio to the baseline on the same questions. against: the
    baseline's name."""
    rates = {id(run.question): run.rate for run in baseline}
    pairs = [(run.rate, rates[id(run.question)]) for run in runs if id(run.question) in rates]
    ours, theirs = [a for a, _ in pairs], [b for _, b in pairs]
    return row(name, ours, "tokens/s", against, theirs)
