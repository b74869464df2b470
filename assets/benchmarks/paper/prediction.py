"""Study "tuner": the speedups that the tuner predicts, beside those of real answers.

A prediction has two parts: the time of a step, and the tokens it gives (Medusa, arXiv 2401.10774,
2.3.3). Each is compared alone, and then both together.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from statistics import fmean

from acceptance_counts import AcceptanceCounts
from figures import GREEDY
from report_data import Figures

from medusa_chat.bench.answers import (
    AnswerFunction,
    Question,
    Run,
    Variant,
    events_of,
    fastest_of_rounds,
    questions,
    run_of,
)
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.events import Prefilled, Step
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree
from medusa_chat.runtime.tuner import tune
from medusa_chat.trees.auto_tree import rank_accuracies
from medusa_chat.trees.expected_length import expected_lengths

SIZES = (1, 4, 8, 16)
CALIBRATED, COUNTED = "the calibration's accuracies", "the accuracies counted in these answers"


def prediction(context: BenchContext) -> Iterator[Row]:
    """For trees of SIZES nodes: milliseconds of a step, tokens a step and the speedup over plain
    decoding, each measured in greedy answers to the questions, against the prediction by step times
    of the tuner and by the accuracies of the calibration; the tokens also against the prediction by
    accuracies counted in the answers of the largest tree. Each step drafts the whole tree and
    records its details, as the tuner's do. Of several rounds the fastest answer counts; the tuner
    measures before and after the answers, and its smaller times count."""
    source = context.source
    sizes = [size for size in SIZES if size <= len(source)]
    counts = {size: AcceptanceCounts() for size in sizes}
    before = _tuned(context)
    functions: dict[str, AnswerFunction] = {
        str(size): partial(_counted, context, source.head(size), counts[size]) for size in sizes
    }
    asked = questions(context)
    runs = fastest_of_rounds(context, asked, functions, context.rounds)
    costs = (before, _tuned(context))
    prior = rank_accuracies(context.loaded.calibration)
    expected = {
        CALIBRATED: expected_lengths(source, prior),
        COUNTED: expected_lengths(source, counts[sizes[-1]].table(prior)),
    }
    plain = runs[str(sizes[0])]
    for size in sizes:
        yield from _rows(size, runs[str(size)], plain, costs, expected)


def _counted(
    context: BenchContext, tree: Tree, counts: AcceptanceCounts, question: Question
) -> Run:
    """An answer with its details, of which `counts` takes account."""
    events = events_of(context, question, Variant(GREEDY, tree), True)
    (first,) = (event for event in events if isinstance(event, Prefilled))
    steps = [event for event in events if isinstance(event, Step)]
    counts.add_answer(first, steps, context.loaded.info.heads)
    return run_of(question, events)


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
    yield row(f"{name}: step", values, "ms", "the tuner's", against, note)
    if size == 1:
        return
    found = Figures(runs, plain)
    overhead = seconds / min(_at_answers(one, 1, runs) for one in costs)
    yield row(f"{name}: overhead", [found.overhead], "x", "the tuner's", [overhead])
    for by, lengths in expected.items():
        said = lengths[size - 1]
        yield row(f"{name}: tokens a step", [found.acceleration], "tokens/step", by, [said])
        beside = [said / overhead]
        yield row(f"{name}: speedup", [found.speedup], "x", f"predicted by {by}", beside)


def _tuned(context: BenchContext) -> StepCosts:
    context.progress("the tuner's step times")
    *_, tuned = tune(context.loaded, context.budget)
    assert tuned is not None
    return tuned.costs


def _at_answers(costs: StepCosts, size: int, runs: Sequence[Run]) -> float:
    """Seconds of a step of this size in the middle of these answers, by the tuner's times."""
    return fmean(costs.at(size, len(r.question.ids) + len(r.tokens) // 2) for r in runs)
