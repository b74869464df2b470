"""Study "assisted": speculative decoding with a draft model, by draft length, against Medusa.

Medusa, arXiv 2401.10774, appendix D, Figure 7: transformers' assisted generation, which drafts a
chain of tokens with a small model and verifies them in one pass of the large one.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from figures import GREEDY
from report_data import Figures

from medusa_chat.bench.answers import (
    AnswerFunction,
    Question,
    Run,
    Variant,
    answer,
    per_step,
    questions,
    rate,
    rotate,
    speed,
)
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.hf_baseline import (
    DTYPES,
    HFBaseline,
    drafting,
    matching_baseline,
    read_draft,
)
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.units import number

LENGTHS = tuple(range(1, 9))  # draft tokens a step
GENERATE, PLAIN, MEDUSA = "transformers generate", "plain decoding", "medusa"


def assisted(context: BenchContext) -> Iterator[Row]:
    """Tokens a step, overhead and speed of every draft length, greedy and in the precision of the
    loaded model, against `generate` in the same precision."""
    baseline = matching_baseline(context)
    if baseline is None:
        why = f"transformers' assisted generation was not run at {context.loaded.info.precision}"
        yield unmeasured("assisted generation", "tokens/step", why)
        return
    draft = read_draft(context, DTYPES[context.loaded.info.precision])
    if draft is None:
        why = "there is no draft model with this vocabulary: give one with --draft"
        yield unmeasured("assisted generation", "tokens/step", why)
        return
    tree = context.chosen_tree
    names = {length: f"draft of {length}" for length in LENGTHS}
    functions: dict[str, AnswerFunction] = {
        GENERATE: lambda question: baseline.answer(question)[0],
        **{name: partial(_drafted, baseline, draft, length) for length, name in names.items()},
        PLAIN: lambda question: answer(context, question, Variant(GREEDY)),
        MEDUSA: lambda question: answer(context, question, Variant(GREEDY, tree)),
    }
    runs = rotate(context, questions(context), functions)
    note = f"a draft model of {number(draft.num_parameters())} parameters"
    for name in (*names.values(), MEDUSA):
        shown = note if name != MEDUSA else f"{len(tree)} nodes"
        yield per_step(name, runs[name], shown)
    for name in (*names.values(), MEDUSA):
        yield _overhead(name, runs[name], runs[GENERATE])
    for name in functions:
        yield speed(f"{name}: speed", runs[name], runs[GENERATE], GENERATE)


def _drafted(baseline: HFBaseline, draft: Any, length: int, question: Question) -> Run:
    with drafting(draft, length) as options:
        return baseline.answer(question, **options)[0]


def _overhead(name: str, runs: Sequence[Run], base: Sequence[Run]) -> Row:
    """Time of a step, with its drafting, over the time of a token of `generate`."""
    token = 1 / rate(base)
    values = [p.seconds / p.steps / token for p in runs]
    return row(f"{name}: overhead", values, "x", GENERATE, value=Figures(runs, base).overhead)
