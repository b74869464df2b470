"""Contestants of the study "speed": the variants of transformers' `generate`."""

from collections.abc import Callable, Iterator
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
from medusa_chat.decoding.backends.cpu_threads import most as most_threads
from medusa_chat.decoding.backends.cpu_threads import of_torch

DTYPES = ("float32", "bfloat16")
LOOKUP = 10  # tokens that transformers' own prompt lookup proposes: its documentation's value
DRAFTED = 4  # tokens of the draft model at each step
DRAFTS = ("-lookup", "-assisted")  # of generate: not plain decoding


@dataclass
class Contestant:
    """One way to decode. answer: prompt ids -> (token ids without the end token, seconds).

    per_round: tokens a second of each round over all prompts, with prefill, the warm-up first.
    warm_up: seconds of the warm-up, which compiles what is to be compiled. answers: of the last
    turn.
    """

    name: str
    answer: Callable[[list[int]], tuple[tuple[int, ...], float]]
    command: str
    warm_up: float = 0.0
    per_round: list[float] = field(default_factory=list)
    answers: list[tuple[int, ...]] = field(default_factory=list)


def hf_contestants(context: BenchContext, longest: int, compiles: bool) -> Iterator[Contestant]:
    """transformers' generate on the published model in fp32 and bf16: with our number of threads
    and with the most, with its own prompt lookup, with a draft model, and compiled. longest: tokens
    of a prompt."""
    threads = torch.get_num_threads()
    for dtype in DTYPES:
        baseline = read_baseline(context, dtype)
        yield _generate(f"generate-{dtype}", baseline)
        yield _generate(f"generate-{dtype}-lookup", baseline, prompt_lookup_num_tokens=LOOKUP)
        if most_threads() != threads:
            yield _threaded(f"generate-{dtype}-{most_threads()}-threads", baseline, most_threads())
        draft = read_draft(context, dtype)
        if draft is not None:
            yield _assisted(f"generate-{dtype}-assisted", baseline, draft)
        if compiles:  # last, on the same model: a compiled step needs a static cache
            room = longest + context.max_new_tokens
            options = compiled(context.loaded.engine.backbone.device, room)
            yield _generate(f"generate-{dtype}-static", baseline, **options)
            if most_threads() != threads:
                name = f"generate-{dtype}-static-{most_threads()}-threads"
                yield _threaded(name, baseline, most_threads(), **options)


def _generate(name: str, baseline: HFBaseline, **options: Any) -> Contestant:
    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        found = baseline.answer(ids, **options)
        return found.tokens, found.seconds

    shown = {"compile_config": "CompileConfig()"}
    words = "".join(f", {key}={shown.get(key, value)}" for key, value in options.items())
    return Contestant(name, answer, f"transformers generate(do_sample=False{words})")


def _threaded(name: str, baseline: HFBaseline, threads: int, **options: Any) -> Contestant:
    alone = _generate(name, baseline, **options)

    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        with of_torch(threads):
            return alone.answer(ids)

    return Contestant(name, answer, alone.command)


def _assisted(name: str, baseline: HFBaseline, draft: Any) -> Contestant:
    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        with drafting(draft, DRAFTED) as options:
            found = baseline.answer(ids, **options)
        return found.tokens, found.seconds

    words = f"assistant_model=..., num_assistant_tokens={DRAFTED}"
    return Contestant(name, answer, f"transformers generate(do_sample=False, {words})")
