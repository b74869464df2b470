"""Study "speed": whole answers of transformers' generate, our plain decoding and our drafters."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter, sleep
from typing import Any

from medusa_chat.bench.harness.context import PROMPTS, BenchContext
from medusa_chat.bench.harness.hf_baseline import no_compiler
from medusa_chat.bench.harness.rows import Row, row, unmeasured
from medusa_chat.bench.studies.contestants import DRAFTS, Contestant, hf_contestants
from medusa_chat.decoding.events import Finished, Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError
from medusa_chat.runtime.prompt_ids import encode
from medusa_chat.runtime.reply import resolve, with_times_and_text

HOSTILE = (  # prompts with answers that no draft predicts well: digits, other scripts, one word
    "Repeat after me: 48151623426180339887498948482045868343656",
    "Напиши 九 слов על ירח ในภาษาใด ๆ",
    "Say yes.",
)
HOSTILE_ROUNDS = 20  # for each round: the answers are so short that a single one is all noise
TURNS = 8  # answers of ours to a prompt in a round, since they are short
OURS = ("plain", "auto", "medusa", "prompt-lookup")
# seconds of a pause before each group, whose threads may still spin, and of untimed answers
REST, WAKING = 0.3, 0.1


@dataclass
class Steps:
    """Decoding steps of one of our contestants, per round: their number, tokens and seconds."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        """Mean time of a step in each round, in milliseconds."""
        return [1e3 * s / n for s, n in zip(self.seconds, self.steps, strict=True) if n]

    def begin_round(self) -> None:
        """Append an empty round."""
        self.steps.append(0)
        self.tokens.append(0)
        self.seconds.append(0.0)

    def forget_round(self) -> None:
        """Leave out the answers of this round so far, which were not timed."""
        self.steps[-1], self.tokens[-1], self.seconds[-1] = 0, 0, 0.0


def race(context: BenchContext) -> Iterator[Row]:
    """In every round every contestant answers the same prompts at temperature 0, in an order that
    changes with every round. An answer begins with an empty cache, and its time includes the
    prefill. Our contestants alternate TURNS times where another answers once, so that what slows
    the machine for a moment slows them all; their steps record details, as the page's and
    `generate`'s do."""
    prompts, hostile = (_encoded(context, texts) for texts in (PROMPTS, HOSTILE))
    records = {name: Steps() for name in OURS}
    ours = [_ours(name, context, records[name]) for name in OURS]
    longest = max(map(len, prompts))
    why = no_compiler(context.loaded.info.device)
    groups = [*([other] for other in hf_contestants(context, longest, not why)), ours]
    contestants = [contestant for group in groups for contestant in group]
    for number in range(context.rounds + 1):
        context.progress(f"round {number} of {context.rounds}" if number else "warm-up")
        for group in _rotated(groups, number):
            _warm_up(group, prompts, records)
            _run_round(group, prompts, TURNS if group is ours else 1)
    for record in records.values():
        del record.steps[:1], record.tokens[:1], record.seconds[:1]
    if not all(records["medusa"].steps) or not all(records["plain"].steps):
        raise UsageError("the answers end before the first step: raise --max-new-tokens")
    by_name = {c.name: c for c in contestants}
    yield from _rates(by_name)
    yield from _steps(by_name, records)
    yield from _hostile(context, by_name, hostile)
    if not any(name.endswith("-assisted") for name in by_name):
        missing = "there is no draft model with this vocabulary: give one with --draft"
        yield unmeasured("generate, assisted", "tokens/s", missing)
    if why:
        yield unmeasured("generate, static and compiled", "tokens/s", why)


def _encoded(context: BenchContext, texts: tuple[str, ...]) -> list[list[int]]:
    context.loaded.said = ("", [])
    return [encode(context.loaded, [{"role": "user", "content": text}])[0] for text in texts]


def _ours(name: str, context: BenchContext, record: Steps) -> Contestant:
    """Our engine with one drafter; its steps are added to the last entry of `record`."""
    loaded, engine = context.loaded, context.loaded.engine
    asked = GenerationSettings(
        drafter="none" if name == "plain" else name,
        tree=context.tree,
        max_new_tokens=context.max_new_tokens,
        seed=0,
    )

    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        engine.forget()
        started = perf_counter()
        settings, drafter = resolve(loaded, asked)
        for event in with_times_and_text(loaded, engine.generate(ids, drafter, settings)):
            assert not isinstance(event, Prefilled) or event.reused_tokens == 0
        seconds = perf_counter() - started
        assert isinstance(event, Finished)
        record.steps[-1] += event.stats.steps
        record.tokens[-1] += event.stats.emitted
        record.seconds[-1] += event.stats.seconds
        return event.token_ids, seconds

    return Contestant(name, answer, context.command)


def _warm_up(group: list[Contestant], prompts: list[list[int]], records: dict[str, Steps]) -> None:
    """Begin a round of a group with untimed answers, after a pause for the threads of the group
    before."""
    sleep(REST)
    for contestant in group:
        record = records.get(contestant.name, Steps())
        record.begin_round()
        _wake(contestant, prompts)
        record.forget_round()


def _wake(contestant: Contestant, prompts: list[list[int]]) -> None:
    """Untimed answers until the processor runs at its full clock. All prompts are answered where
    that is quick, since our drafters keep what they learn from them for the next answers."""
    begun = perf_counter()
    while perf_counter() - begun < WAKING:
        for ids in prompts:
            contestant.answer(ids)
            if perf_counter() - begun > 2 * WAKING:
                return


def _run_round(group: list[Contestant], prompts: list[list[int]], turns: int) -> None:
    """One round: every contestant of the group answers all prompts `turns` times, in an order that
    changes with every turn. The first round is the warm-up."""
    seconds = dict.fromkeys((contestant.name for contestant in group), 0.0)
    for turn in range(turns):
        for contestant in _rotated(group, turn):
            found = [contestant.answer(ids) for ids in prompts]
            seconds[contestant.name] += sum(s for _, s in found)
            contestant.answers = [ids for ids, _ in found]
    for contestant in group:
        count = turns * sum(map(len, contestant.answers))
        if not contestant.per_round:
            contestant.warm_up = seconds[contestant.name]
        contestant.per_round.append(count / seconds[contestant.name])


def _rotated(values: list[Any], number: int) -> list[Any]:
    """The values from the one with this number on, those before it behind."""
    at = number % len(values)
    return [*values[at:], *values[:at]]


def _rates(by_name: dict[str, Contestant]) -> Iterator[Row]:
    """Tokens a second, all against the fastest plain `generate` of any precision."""
    rates = {name: c.per_round[1:] for name, c in by_name.items()}
    plain_generate = [name for name in by_name if name not in OURS and not name.endswith(DRAFTS)]
    fastest = max(plain_generate, key=lambda n: median(rates[n]))
    names = [n for n in by_name if n not in OURS]
    for name in [*names, "generate", *OURS]:
        real = fastest if name == "generate" else name
        against = fastest if name == "generate" else f"generate ({fastest})"
        command, values = by_name[real].command, rates[real]
        note = f"compiling took {by_name[real].warm_up:.0f} s, not counted"
        note = note if real.endswith("-static") else ""
        yield row(name, values, "tokens/s", command, against, rates[fastest], note)
    command = "medusa-chat bench"
    for name in OURS[1:]:
        label = f"{name} / plain"
        yield row(label, rates[name], "tokens/s", command, "plain", rates["plain"])


def _steps(by_name: dict[str, Contestant], records: dict[str, Steps]) -> Iterator[Row]:
    plain, medusa = records["plain"], records["medusa"]
    ours = by_name["medusa"].command
    rates = {
        name: [t / s for t, s in zip(r.tokens, r.seconds, strict=True)]
        for name, r in (("medusa", medusa), ("plain", plain))
    }
    label, without = "medusa, without prefill", "plain, without prefill"
    yield row(label, rates["medusa"], "tokens/s", ours, without, rates["plain"])
    lengths = [t / s for t, s in zip(medusa.tokens, medusa.steps, strict=True)]
    yield row("acceleration rate", lengths, "tokens/step", ours)
    yield row("plain step", plain.milliseconds, "ms", by_name["plain"].command)
    yield row("tree step", medusa.milliseconds, "ms", ours, "plain step", plain.milliseconds)
    for name in OURS[1:]:
        pairs = zip(by_name[name].answers, by_name["plain"].answers, strict=True)
        same = [float(a == b) for a, b in pairs]
        label = "identical to plain" if name == "medusa" else f"identical to plain, {name}"
        yield row(label, [sum(same) / len(same)], "of answers", "medusa-chat bench")


def _hostile(
    context: BenchContext, by_name: dict[str, Contestant], prompts: list[list[int]]
) -> Iterator[Row]:
    """The default against plain decoding where drafts fail, the worst prompt. Each timed answer
    follows one to the same prompt, so that the draft budget has learnt nothing from easier ones."""
    context.progress("hostile prompts")
    ratios: list[list[float]] = [[] for _ in prompts]
    for number in range(HOSTILE_ROUNDS * context.rounds + 1):
        for found, ids in zip(ratios, prompts, strict=True):
            names = ("plain", "auto") if number % 2 else ("auto", "plain")
            seconds = dict.fromkeys(names, 0.0)
            for name in (*names, *reversed(names)):  # the first one finds a cooler machine
                by_name[name].answer(ids)  # untimed, since a chat does not change drafters
                seconds[name] += by_name[name].answer(ids)[1]
            if number:
                found.append(seconds["plain"] / seconds["auto"])
    worst = min(ratios, key=lambda values: median(values))
    yield row("worst hostile prompt", worst, "x", context.command, "plain", [1.0] * len(worst))
