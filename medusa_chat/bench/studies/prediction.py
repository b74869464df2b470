"""Study "tuner": the speedups that the tuner predicts, beside those of real answers.

A prediction has two parts: the time of a step, and the tokens it gives (Medusa, arXiv 2401.10774,
2.3.3). Each is compared alone, and then both together.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from operator import attrgetter
from statistics import fmean

from medusa_chat.bench.harness.answers import questions, rotate
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.report_data import Figures, Question, Run
from medusa_chat.bench.harness.rows import Row, row
from medusa_chat.decoding.events import Finished, Prefilled, Reading, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import ContextError
from medusa_chat.runtime.tuner import tune
from medusa_chat.trees.acceptance_counts import AcceptanceCounts
from medusa_chat.trees.auto_tree import rank_accuracies, source_tree
from medusa_chat.trees.expected_length import expected_lengths

SIZES = (1, 4, 8, 16)
COMMAND = "medusa-chat bench --study tuner"
CALIBRATED, COUNTED = "the calibration's accuracies", "the accuracies counted in these answers"


def prediction(context: BenchContext) -> Iterator[Row]:
    """For trees of SIZES nodes: milliseconds of a step, tokens a step and the speedup over plain
    decoding, each measured in greedy answers to the questions, against the prediction by step times
    of the tuner and by the accuracies of the calibration; the tokens also against the prediction by
    accuracies counted in the answers of the largest tree. Each step drafts the whole tree and
    records its details, as the tuner's do. Of several rounds the fastest answer counts; the tuner
    measures before and after the answers, and its smaller times count."""
    loaded = context.loaded
    source = source_tree(loaded.calibration, loaded.info.heads)
    sizes = [size for size in SIZES if size <= len(source)]
    counts = AcceptanceCounts()
    before = _tuned(context)
    functions = {
        str(size): partial(
            _answer, context, source.head(size), counts if size == sizes[-1] else None
        )
        for size in sizes
    }
    asked = questions(context)
    runs = _fastest([rotate(context, asked, functions) for _ in range(context.rounds)])
    costs = (before, _tuned(context))
    prior = rank_accuracies(loaded.calibration)
    expected = {
        CALIBRATED: expected_lengths(source, prior),
        COUNTED: expected_lengths(source, counts.whole.table(prior)),
    }
    plain = runs[str(sizes[0])]
    for size in sizes:
        yield from _rows(size, runs[str(size)], plain, costs, expected)


def _fastest(rounds: Sequence[dict[str, list[Run]]]) -> dict[str, list[Run]]:
    """Of each answer the fastest of its rounds, which all have the same tokens."""
    return {
        name: [
            min(same, key=attrgetter("seconds"))
            for same in zip(*(found[name] for found in rounds), strict=True)
        ]
        for name in rounds[0]
    }


def _rows(
    size: int,
    runs: Sequence[Run],
    plain: Sequence[Run],
    costs: Sequence[StepCosts],
    expected: dict[str, tuple[float, ...]],
) -> Iterator[Row]:
    """The rows of one size. plain: the answers of one node."""
    seconds = min(_at_answers(one, size, runs) for one in costs)
    values = [1e3 * run.seconds / run.steps for run in runs]
    name = f"{size} nodes" if size > 1 else "plain decoding"
    note = "the median of answers, against the tuner's smallest"
    against = [1e3 * seconds] * len(values)
    yield row(f"{name}: step", values, "ms", COMMAND, "the tuner's", against, note)
    if size == 1:
        return
    found = Figures(runs, plain)
    overhead = seconds / min(_at_answers(one, 1, runs) for one in costs)
    yield row(f"{name}: overhead", [found.overhead], "x", COMMAND, "the tuner's", [overhead])
    for by, lengths in expected.items():
        said = lengths[size - 1]
        yield row(
            f"{name}: tokens a step", [found.acceleration], "tokens/step", COMMAND, by, [said]
        )
        beside = [said / overhead]
        yield row(f"{name}: speedup", [found.speedup], "x", COMMAND, f"predicted by {by}", beside)


def _tuned(context: BenchContext) -> StepCosts:
    context.progress("the tuner's step times")
    *_, tuned = tune(context.loaded, context.budget)
    assert tuned is not None
    return tuned.costs


def _at_answers(costs: StepCosts, size: int, runs: Sequence[Run]) -> float:
    """Seconds of a step of this size in the middle of these answers, by the tuner's times."""
    return fmean(costs.at(size, len(r.question.ids) + len(r.tokens) // 2) for r in runs)


def _answer(
    context: BenchContext, tree: Tree, counts: AcceptanceCounts | None, question: Question
) -> Run | None:
    """A greedy answer from an empty cache, with details; None where the context has no space for
    it. counts: where its accuracies are counted."""
    name, engine = "none" if len(tree) == 1 else "medusa", context.loaded.engine
    settings = GenerationSettings(
        drafter=name, nodes=len(tree), max_new_tokens=context.max_new_tokens, seed=0
    )
    engine.forget()
    try:
        told = engine.generate(question.ids, engine.drafter(settings, tree), settings)
        events = [event for event in told if not isinstance(event, Reading)]
    except ContextError:
        return None
    first, *steps, last = events
    assert isinstance(first, Prefilled) and isinstance(last, Finished)
    if counts is not None:
        kept = [step for step in steps if isinstance(step, Step)]
        counts.add_answer(first, kept, context.loaded.info.heads)
    stats = last.stats
    return Run(question, last.token_ids, stats.steps, stats.emitted, stats.seconds)
