"""Study "speed": whole answers by transformers' generate, our plain decoding and our drafters."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch

from medusa_chat.bench.answers import (
    Question,
    Run,
    mean_step,
    page_run,
    question_of,
    rate,
    rotated,
)
from medusa_chat.bench.context import PROMPTS, BenchContext
from medusa_chat.bench.hf_baseline import (
    HFBaseline,
    compiled,
    drafting,
    no_compiler,
    read_baseline,
    read_draft,
)
from medusa_chat.bench.rows import Row, row, unmeasured
from medusa_chat.checkpoints.devices import most_threads, torch_threads
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.gguf_files import is_gguf

HOSTILE = (  # prompts with answers that no draft predicts well: digits, other scripts, one word
    "Repeat after me: 48151623426180339887498948482045868343656",
    "Напиши 九 слов על ירח ในภาษาใด ๆ",
    "Say yes.",
)
HOSTILE_ROUNDS = 20  # for each round: the answers are so short that a single one is all noise
TURNS = 8  # answers of ours to a prompt in a round, since they are short
COMMAND = "medusa-chat bench"
OURS = ("plain", "auto", "medusa", "prompt-lookup")
# seconds of a pause before each group, whose threads may still spin, and of untimed answers
REST, WAKING = 0.3, 0.1
DTYPES = ("float32", "bfloat16")
LOOKUP = 10  # tokens that transformers' own prompt lookup proposes: its documentation's value
DRAFTED = 4  # tokens of the draft model at each step
DRAFTS = ("-lookup", "-assisted")  # of generate: not plain decoding
FILE = "transformers would unpack the GGUF file: --study peers compares it with llama.cpp"


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
        """Tokens per second of each round over all prompts, with prefill, without the warm-up."""
        pairs = list(zip(self.runs, self.seconds, strict=True))[1:]
        return [sum(len(run.tokens) for run in runs) / seconds for runs, seconds in pairs]


def race(context: BenchContext) -> Iterator[Row]:
    """In every round every contestant answers the same prompts at temperature 0, in an order that
    changes with every round. An answer begins with an empty cache, and its time includes the
    prefill. Our contestants alternate TURNS times where another answers once, so that what slows
    the machine for a moment slows them all; their steps record details, as the page's and
    `generate`'s do."""
    context.loaded.said = ()
    prompts, hostile = ([question_of(context, t) for t in texts] for texts in (PROMPTS, HOSTILE))
    ours = [_ours(name, context) for name in names_of(context)]
    longest = max(len(question.ids) for question in prompts)
    why = no_compiler(context.loaded.info.device)
    groups = [*([other] for other in hf_contestants(context, longest, not why)), ours]
    for number in range(context.rounds + 1):
        context.progress(f"round {number} of {context.rounds}" if number else "warm-up")
        for group in rotated(groups, number):
            sleep(REST)
            for contestant in group:
                _wake(contestant, prompts)
            _run_round(group, prompts, TURNS if group is ours else 1)
    by_name = {c.name: c for group in groups for c in group}
    rounds = [runs for one in ours for runs in one.runs[1:]]
    if not all(any(run.steps for run in runs) for runs in rounds):
        raise UsageError("the answers end before the first step: raise --max-new-tokens")
    yield from _rates(by_name)
    yield from _steps(by_name)
    yield from _hostile(context, by_name, hostile)
    if is_gguf(Checkpoint.find(context.request).source.name):
        yield unmeasured("generate", "tokens/s", FILE)
        return
    if not any(name.endswith("-assisted") for name in by_name):
        missing = "there is no draft model with this vocabulary: give one with --draft"
        yield unmeasured("generate, assisted", "tokens/s", missing)
    if why:
        yield unmeasured("generate, static and compiled", "tokens/s", why)


def names_of(context: BenchContext) -> list[str]:
    """Those of OURS that the model has."""
    return [name for name in OURS if context.loaded.info.heads or name != "medusa"]


def _ours(name: str, context: BenchContext) -> Contestant:
    """Our engine with one drafter, as the page decodes."""
    drafter = "none" if name == "plain" else name
    asked = GenerationSettings(drafter=drafter, tree=context.tree, seed=0)

    def answer(question: Question) -> tuple[Run, float]:
        started = perf_counter()
        run = page_run(context, question, asked)
        return run, perf_counter() - started

    return Contestant(name, answer, context.command)


def _wake(contestant: Contestant, prompts: list[Question]) -> None:
    """Untimed answers until the processor runs at its full clock. All prompts are answered where
    that is quick, since our drafters keep what they learn from them for the next answers."""
    begun = perf_counter()
    while perf_counter() - begun < WAKING:
        for question in prompts:
            contestant.answer(question)
            if perf_counter() - begun > 2 * WAKING:
                return


def _run_round(group: list[Contestant], prompts: list[Question], turns: int) -> None:
    """One round: every contestant of the group answers all prompts `turns` times, in an order that
    changes with every turn. The first round is the warm-up."""
    for contestant in group:
        contestant.runs.append([])
        contestant.seconds.append(0.0)
    for turn in range(turns):
        for contestant in rotated(group, turn):
            for question in prompts:
                run, seconds = contestant.answer(question)
                contestant.runs[-1].append(run)
                contestant.seconds[-1] += seconds


def _rates(by_name: dict[str, Contestant]) -> Iterator[Row]:
    """Tokens a second, all against the fastest plain `generate` of any precision."""
    rates = {name: contestant.rates for name, contestant in by_name.items()}
    names, ours = ([n for n in by_name if (n in OURS) is own] for own in (False, True))
    plain_generate = [name for name in names if not name.endswith(DRAFTS)] or ["plain"]
    fastest = max(plain_generate, key=lambda n: median(rates[n]))
    for name in [*names, *(["generate"] if names else []), *ours]:
        real = fastest if name == "generate" else name
        against = fastest if name == "generate" or not names else f"generate ({fastest})"
        command, values = by_name[real].command, rates[real]
        note = f"compiling took {by_name[real].seconds[0]:.0f} s, not counted"
        note = note if real.endswith("-static") else ""
        yield row(name, values, "tokens/s", against, rates[fastest], note, command=command)
    for name in ours[1:] if names else ():
        label = f"{name} / plain"
        yield row(label, rates[name], "tokens/s", "plain", rates["plain"], command=COMMAND)


def _steps(by_name: dict[str, Contestant]) -> Iterator[Row]:
    """Steps of the heads' drafts, or where there are none of the default's."""
    drafter = "medusa" if "medusa" in by_name else "auto"
    plain, medusa = by_name["plain"].runs[1:], by_name[drafter].runs[1:]
    ours = by_name[drafter].command
    rates, base = [rate(runs) for runs in medusa], [rate(runs) for runs in plain]
    label, without = f"{drafter}, without prefill", "plain, without prefill"
    yield row(label, rates, "tokens/s", without, base, command=ours)
    lengths = [sum(r.stepped for r in runs) / sum(r.steps for r in runs) for runs in medusa]
    yield row("acceleration rate", lengths, "tokens/step", command=ours)
    each, base = ([1e3 * mean_step(runs) for runs in found] for found in (medusa, plain))
    yield row("plain step", base, "ms", command=by_name["plain"].command)
    yield row("tree step", each, "ms", "plain step", base, command=ours)
    for name in [n for n in OURS[1:] if n in by_name]:
        last = zip(by_name[name].runs[-1], by_name["plain"].runs[-1], strict=True)
        same = [float(a.tokens == b.tokens) for a, b in last]
        label = "identical to plain" if name == "medusa" else f"identical to plain, {name}"
        yield row(label, [sum(same) / len(same)], "of answers", command=COMMAND)


def _hostile(
    context: BenchContext, by_name: dict[str, Contestant], prompts: list[Question]
) -> Iterator[Row]:
    """The default against plain decoding where drafts fail, the worst prompt. Each timed answer
    follows one to the same prompt, so that the draft budget has learnt nothing from easier ones."""
    context.progress("hostile prompts")
    ratios: list[list[float]] = [[] for _ in prompts]
    for number in range(HOSTILE_ROUNDS * context.rounds + 1):
        for found, question in zip(ratios, prompts, strict=True):
            names = ("plain", "auto") if number % 2 else ("auto", "plain")
            seconds = dict.fromkeys(names, 0.0)
            for name in (*names, *reversed(names)):  # the first one finds a cooler machine
                by_name[name].answer(question)  # untimed, since a chat does not change drafters
                seconds[name] += by_name[name].answer(question)[1]
            if number:
                found.append(seconds["plain"] / seconds["auto"])
    worst = min(ratios, key=lambda values: median(values))
    yield row(
        "worst hostile prompt", worst, "x", "plain", [1.0] * len(worst), command=context.command
    )


def hf_contestants(context: BenchContext, longest: int, compiles: bool) -> Iterator[Contestant]:
    """transformers' generate on the published model in fp32 and bf16: with our number of threads
    and with the most, with its own prompt lookup, with a draft model, and compiled. longest: tokens
    of a prompt. None for a GGUF file, which transformers unpacks to 16 or 32 bits."""
    if is_gguf(Checkpoint.find(context.request).source.name):
        return
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
        with torch_threads(threads):
            if draft is None:
                return baseline.answer(question, **options)
            with drafting(draft, DRAFTED) as by_draft:
                return baseline.answer(question, **options, **by_draft)

    shown = options | ({"compile_config": "CompileConfig()"} if "compile_config" in options else {})
    if draft is not None:
        shown |= {"assistant_model": "...", "num_assistant_tokens": DRAFTED}
    words = "".join(f", {key}={value}" for key, value in shown.items())
    return Contestant(name, answer, f"transformers generate(do_sample=False{words})")
