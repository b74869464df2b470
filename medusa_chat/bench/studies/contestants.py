"""Contestants of the study "speed": the variants of transformers' `generate`."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from medusa_chat.bench.harness.context import BenchContext
from medusa_chat.bench.harness.hf_baseline import (
    HFBaseline,
    compiled,
    drafting,
    read_baseline,
    read_draft,
)
from medusa_chat.bench.harness.report_data import Question, Run
from medusa_chat.decoding.backends.cpu_threads import most as most_threads
from medusa_chat.decoding.backends.cpu_threads import of_torch

DTYPES = ("float32", "bfloat16")
LOOKUP = 10  # tokens that transformers' own prompt lookup proposes: its documentation's value
DRAFTED = 4  # tokens of the draft model at each step
DRAFTS = ("-lookup", "-assisted")  # of generate: not plain decoding


@dataclass
class Contestant:
    """One way to decode. answer: a question -> its Run, and the seconds of the whole answer.

    runs, seconds: of each round the timed answers and their whole seconds, the warm-up first, which
    compiles what is to be compiled.
    """

    name: str
    answer: Callable[[Question], tuple[Run, float]]
    command: str
    runs: list[list[Run]] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rates(self) -> list[float]:
        """Tokens a second of each round over all prompts, with prefill, without the warm-up."""
        pairs = list(zip(self.runs, self.seconds, strict=True))[1:]
        return [sum(len(run.tokens) for run in runs) / seconds for runs, seconds in pairs]


def hf_contestants(context: BenchContext, longest: int, compiles: bool) -> Iterator[Contestant]:
    """transformers' generate on the published model in fp32 and bf16: with our number of threads
    and with the most, with its own prompt lookup, with a draft model, and compiled. longest: tokens
    of a prompt."""
    threads, most = torch.get_num_threads(), most_threads()
    for dtype in DTYPES:
        baseline, name = read_baseline(context, dtype), f"generate-{dtype}"
        yield _generate(name, baseline, threads)
        yield _generate(f"{name}-lookup", baseline, threads, prompt_lookup_num_tokens=LOOKUP)
        if most != threads:
            yield _generate(f"{name}-{most}-threads", baseline, most)
        draft = read_draft(context, dtype)
        if draft is not None:
            yield _generate(f"{name}-assisted", baseline, threads, draft)
        if compiles:  # last, on the same model: a compiled step needs a static cache
            room = longest + context.max_new_tokens
            options = compiled(context.loaded.engine.backbone.device, room)
            yield _generate(f"{name}-static", baseline, threads, **options)
            if most != threads:
                yield _generate(f"{name}-static-{most}-threads", baseline, most, **options)


def _generate(
    name: str, baseline: HFBaseline, threads: int, draft: Any = None, **options: Any
) -> Contestant:
    def answer(question: Question) -> tuple[Run, float]:
        with (
            of_torch(threads),
            nullcontext({}) if draft is None else drafting(draft, DRAFTED) as by,
        ):
            return baseline.answer(question, **options, **by)

    by_draft = {} if draft is None else {"assistant_model": "...", "num_assistant_tokens": DRAFTED}
    shown = {"compile_config": "CompileConfig()"}
    told = (options | by_draft).items()
    words = "".join(f", {key}={shown.get(key, value)}" for key, value in told)
    return Contestant(name, answer, f"transformers generate(do_sample=False{words})")
