"""Study "assisted": speculative decoding with a draft model, by draft length, beside Medusa.

Medusa, arXiv 2401.10774, appendix D, Figure 7: transformers' assisted generation, which drafts a
chain of tokens with a small model and lets the large one check them in one pass.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from math import fsum
from typing import Any

from medusa_chat.bench.harness.answers import (
    Answerer,
    Way,
    answer,
    per_step,
    questions,
    rotate,
    speed,
)
from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.hf_baseline import (
    DTYPES,
    HFBaseline,
    baseline_run,
    drafting,
    read_draft,
    same_precision,
)
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.bench.harness.rows import Row, row, unmeasured
from medusa_chat.bench.studies.paper import GREEDY, auto

LENGTHS = tuple(range(1, 9))  # draft tokens a step
GENERATE, PLAIN, MEDUSA = "transformers generate", "plain decoding", "medusa"
COMMAND = "medusa-chat bench --study assisted"


def assisted(course: BenchContext) -> Iterator[Row]:
    """Tokens a step, overhead of a step and speed of every draft length, greedy, in the precision
    of the loaded model, all against `generate` of the same."""
    stock = same_precision(course)
    if stock is None:
        why = f"transformers' assisted generation was not run at {course.loaded.info.precision}"
        yield unmeasured("assisted generation", "tokens/step", why)
        return
    draft = read_draft(course, DTYPES[course.loaded.info.precision])
    if draft is None:
        why = "there is no draft model of this vocabulary: give one with --draft"
        yield unmeasured("assisted generation", "tokens/step", why)
        return
    tree = auto(course)
    names = {length: f"draft of {length}" for length in LENGTHS}
    ways: dict[str, Answerer] = {
        GENERATE: partial(baseline_run, stock, options={}),
        **{name: partial(_drafted, stock, draft, length) for length, name in names.items()},
        PLAIN: lambda question: answer(course, question, Way(GREEDY)),
        MEDUSA: lambda question: answer(course, question, Way(GREEDY, tree)),
    }
    plays = rotate(course, questions(course), ways)
    note = f"a draft model of {draft.num_parameters() / 1e6:.2f} M parameters"
    for name in (*names.values(), MEDUSA):
        said = note if name != MEDUSA else f"{len(tree)} nodes"
        yield per_step(name, plays[name], COMMAND, said)
    for name in (*names.values(), MEDUSA):
        yield _overhead(name, plays[name], plays[GENERATE])
    for name in ways:
        yield speed(f"{name}: speed", plays[name], plays[GENERATE], COMMAND, GENERATE)


def _drafted(stock: HFBaseline, draft: Any, length: int, question: Question) -> Run | None:
    with drafting(draft, length) as options:
        return baseline_run(stock, question, options)


def _overhead(name: str, plays: Sequence[Run], base: Sequence[Run]) -> Row:
    """Time of a step, drafting included, over the time of a token of `generate`."""
    token = fsum(p.seconds for p in base) / fsum(p.stepped for p in base)
    values = [p.seconds / p.steps / token for p in plays]
    found = row(f"{name}: overhead", values, "x", COMMAND, GENERATE)
    return {**found, "value": fsum(p.seconds for p in plays) / sum(p.steps for p in plays) / token}
