"""Study "report": the loaded checkpoint's row of Table 1, on questions in MT-Bench's format.

Acceleration rate, overhead and speedup are the paper's (Medusa, arXiv 2401.10774, B.1): tokens a
step; time of a step over time of a step that gives one token; the first over the second. Every
ratio names its baseline: our plain decoding, or transformers' `generate`.
"""

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from paper_context import PaperContext
from report_data import Answered, Figures, Report, Turn

from medusa_chat import paths
from medusa_chat.bench.answers import (
    NO_STEP,
    AnswerFunction,
    Question,
    Run,
    Variant,
    answer,
    asked_rows,
    rotated,
)
from medusa_chat.bench.hf_baseline import matching_baseline
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ContextError, UsageError
from medusa_chat.runtime.prompt import encode
from medusa_chat.training.conversations import Conversation
from medusa_chat.trees.presets import load_tree

MEDUSA, PLAIN, GENERATE = "medusa", "plain decoding", "transformers generate"
BASES = (PLAIN, GENERATE)


def report(context: PaperContext) -> Iterator[Row]:
    """The turns of every question, each answered by Medusa and by the baselines after the same
    conversation, the one with Medusa's answers."""
    rows, source = _rows_of_file(context)
    kept, settings = context.report, context.settings
    tree = context.chosen_tree if context.tree == "auto" else load_tree(context.tree)
    baseline = matching_baseline(context)
    options = sampling(settings)
    functions: dict[str, AnswerFunction] = {
        MEDUSA: lambda question: answer(context, question, Variant(settings, tree)),
        PLAIN: lambda question: answer(context, question, Variant(settings)),
    }
    if baseline is not None:
        functions[GENERATE] = lambda question: baseline.answer(question, **options)[0]
    kept.source, kept.settings = source, settings
    for place, found in enumerate(rows):
        context.progress(f"question {place + 1} of {len(rows)}")
        number = place + 1 if found.number is None else found.number
        kept.answered.append(
            Answered(number, found.category, _turns(context, found, functions, place))
        )
    if figures(kept.answered, PLAIN) is None:
        raise UsageError(NO_STEP)
    for base in BASES:
        yield from _rows(context, kept.answered, base)


def _rows_of_file(context: PaperContext) -> tuple[list[Conversation], str]:
    """The rows of --prompts, or of our own questions, and the file's name. Raises UsageError."""
    file = context.prompts or paths.asset("benchmarks", "questions.jsonl")
    if not file.is_file():
        raise UsageError("there are no questions: give --prompts FILE in MT-Bench's format")
    context.loaded.said = ()
    return asked_rows(context, file), file.name


def _turns(
    context: PaperContext, found: Conversation, functions: dict[str, AnswerFunction], place: int
) -> tuple[Turn, ...]:
    """The turns of a row. Those after a turn without space in the context are not asked."""
    messages = found.system_messages
    turns: list[Turn] = []
    for number, text in enumerate(found.asked):
        if turns and turns[-1].answer is None:
            turns.append(Turn(text, None, {}))
            continue
        messages.append({"role": "user", "content": text})
        question = Question(encode(context.loaded, messages).ids, found.category)
        names = rotated(list(functions), place + number)  # no function is always the first
        try:
            runs = {name: functions[name](question) for name in names}
        except ContextError:
            turns.append(Turn(text, None, {}))
            continue
        said = _text(context, runs[MEDUSA])
        messages.append({"role": "assistant", "content": said})
        turns.append(Turn(text, said, {n: p for n, p in runs.items() if p.is_timed}))
    return tuple(turns)


def _text(context: PaperContext, run: Run) -> str:
    return str(context.loaded.tokenizer.decode(run.tokens, skip_special_tokens=True)).strip()


def figures(answered: Sequence[Answered], base: str) -> Figures | None:
    """The figures of the turns in which Medusa and the baseline had a step; None without any."""
    turns = [t for one in answered for t in one.turns if MEDUSA in t.runs and base in t.runs]
    if not turns:
        return None
    return Figures([t.runs[MEDUSA] for t in turns], [t.runs[base] for t in turns])


def by_category(answered: Sequence[Answered]) -> dict[str, list[Answered]]:
    """The rows of each category in the order of the file; the last, "all", holds all of them."""
    kinds: dict[str, list[Answered]] = {}
    for one in answered:
        kinds.setdefault(one.category or "without a category", []).append(one)
    whole = {"all": list(answered)}
    return whole if len(kinds) == 1 else kinds | whole


def _rows(context: PaperContext, answered: Sequence[Answered], base: str) -> Iterator[Row]:
    """Three rows for each category. Minimum and maximum are of single answers."""
    precision = context.loaded.info.precision
    against = f"{base}, {precision}"
    if not any(base in turn.runs for one in answered for turn in one.turns):
        why = f"{base} was not run at {precision}"
        yield unmeasured(f"speedup against {base}", "x", why)
        return
    for kind, rows in by_category(answered).items():
        found = figures(rows, base)
        if found is None:
            yield unmeasured(
                f"{kind}: speedup against {base}", "x", "none of its answers has a decoding step"
            )
            continue
        single = [Figures([a], [b]) for a, b in zip(found.ours, found.base, strict=True)]
        if base == PLAIN:
            each = [one.acceleration for one in single]
            yield _whole(f"{kind}: acceleration rate", found.acceleration, each, "tokens/step")
        overheads, speedups = [[f.overhead for f in single], [f.speedup for f in single]]
        label = "" if base == PLAIN else f" against {base}"
        yield _whole(f"{kind}: overhead{label}", found.overhead, overheads, "x", against)
        yield _whole(f"{kind}: speedup{label}", found.speedup, speedups, "x", against)


def _whole(
    name: str, value: float, each: list[float], unit: str, against: str | None = None
) -> Row:
    found = row(name, each, unit, against, value=value)
    return {**found, "min": min(value, found["min"]), "max": max(value, found["max"])}


def model_answers(found: Report, model_id: str) -> str:
    """The answers as FastChat's model_answer/MODEL.jsonl, which its judges read. The text is
    empty where the context had no space for an answer."""
    lines = []
    for one in found.answered:
        choice = {"index": 0, "turns": [turn.answer or "" for turn in one.turns]}
        values = {
            "question_id": one.number,
            "answer_id": uuid.uuid4().hex,
            "model_id": model_id,
            "choices": [choice],
            "tstamp": time.time(),
        }
        lines.append(json.dumps(values, ensure_ascii=False) + "\n")
    return "".join(lines)


def sampling(settings: GenerationSettings) -> dict[str, Any]:
    """Options of `generate` for the temperature of the settings."""
    if not settings.temperature:
        return {}
    return {"do_sample": True, "temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
