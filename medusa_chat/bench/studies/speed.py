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
from medusa_chat.runtime.tuner import governor_of
from medusa_chat.runtime.worker import encode, resolve

HOSTILE = (  # nothing here is foreseen well: digits, other scripts, an answer of a word
    "Repeat after me: 48151623426180339887498948482045868343656",
    "Напиши 九 слов על ירח ในภาษาใด ๆ",
    "Say yes.",
)
OFTENER = 20  # rounds of answers so short that one alone is all chance, each in both orders
TURNS = 8  # of ours, one after another, in a round: alone each would be over in a moment
OURS = ("plain", "medusa", "prompt-lookup")
# seconds before each, ours together: threads of the one before may wait awake, and a core be taken
REST, WAKING = 0.3, 0.1


@dataclass
class Steps:
    """Decoding steps of one of our own contestants, per round: how many, tokens, seconds."""

    steps: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> list[float]:
        """Mean step of each round."""
        return [1e3 * s / n for s, n in zip(self.seconds, self.steps, strict=True) if n]

    def begin_round(self) -> None:
        self.steps.append(0)
        self.tokens.append(0)
        self.seconds.append(0.0)

    def forget_round(self) -> None:
        """What this round had so far was not timed."""
        self.steps[-1], self.tokens[-1], self.seconds[-1] = 0, 0, 0.0


def race(context: BenchContext) -> Iterator[Row]:
    """Every round answers the same prompts with every contestant at temperature 0, in an order
    that moves on by one each round; an answer's time includes its prefill and starts from an
    empty cache. Our own take turns TURNS times where one of the others answers once, so that what
    slows the machine for a moment slows them all; their steps are timed without the record that a
    trace keeps of each."""
    prompts, hostile = (_encoded(context, texts) for texts in (PROMPTS, HOSTILE))
    records = {name: Steps() for name in OURS}
    ours = [_ours(name, context, records[name]) for name in OURS]
    longest = max(map(len, prompts))
    why = no_compiler(context.loaded.info.device)
    groups = [*([who] for who in hf_contestants(context, longest, not why)), ours]
    contestants = [who for group in groups for who in group]
    for number in range(context.rounds + 1):
        context.progress(f"round {number} of {context.rounds}" if number else "warm-up")
        for group in _turned(groups, number):
            sleep(REST)
            for who in group:
                record = records.get(who.name, Steps())
                record.begin_round()
                _wake(who, prompts)
                record.forget_round()
            _play(group, prompts, TURNS if group is ours else 1)
    for record in records.values():
        del record.steps[:1], record.tokens[:1], record.seconds[:1]
    if not all(records["medusa"].steps) or not all(records["plain"].steps):
        raise UsageError("the answers end before the first step: raise --max-new-tokens")
    by_name = {c.name: c for c in contestants}
    yield from _rates(by_name)
    yield from _steps(by_name, records)
    yield from _hostile(context, by_name, hostile)
    if not any(name.endswith("-assisted") for name in by_name):
        none = "there is no draft model of this vocabulary: give one with --draft"
        yield unmeasured("generate, assisted", "tokens/s", none)
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
    settings, shape = resolve(loaded, asked)

    def answer(ids: list[int]) -> tuple[tuple[int, ...], float]:
        engine.forget()
        started = perf_counter()
        governor = governor_of(loaded, asked)
        maker = engine.drafter(settings, shape, details=False, governor=governor)
        for event in engine.generate(ids, maker, settings, details=False):
            assert not isinstance(event, Prefilled) or event.reused_tokens == 0
        seconds = perf_counter() - started
        assert isinstance(event, Finished)
        record.steps[-1] += event.stats.steps
        record.tokens[-1] += round((event.stats.acceleration_rate or 0) * event.stats.steps)
        record.seconds[-1] += event.stats.seconds
        return event.token_ids, seconds

    return Contestant(name, answer, context.command)


def _wake(contestant: Contestant, prompts: list[list[int]]) -> None:
    """Untimed answers: a processor that rested takes a while to be as fast as it can. To all
    prompts where that is soon done, for what ours learn from them stays with the next ones."""
    begun = perf_counter()
    while perf_counter() - begun < WAKING:
        for ids in prompts:
            contestant.answer(ids)
            if perf_counter() - begun > 2 * WAKING:
                return


def _play(group: list[Contestant], prompts: list[list[int]], turns: int) -> None:
    """A round of theirs: all prompts, in turns. The first round of all is the warm-up."""
    seconds = dict.fromkeys((who.name for who in group), 0.0)
    for turn in range(turns):
        for who in _turned(group, turn):
            found = [who.answer(ids) for ids in prompts]
            seconds[who.name] += sum(s for _, s in found)
            who.answers = [ids for ids, _ in found]
    for who in group:
        count = turns * sum(map(len, who.answers))
        if not who.per_round:
            who.warm_up = seconds[who.name]
        who.per_round.append(count / seconds[who.name])


def _turned(values: list[Any], number: int) -> list[Any]:
    """The same, from another one on."""
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
    for name in ("medusa", "prompt-lookup"):
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
    for name in ("medusa", "prompt-lookup"):
        pairs = zip(by_name[name].answers, by_name["plain"].answers, strict=True)
        same = [float(a == b) for a, b in pairs]
        label = "identical to plain" if name == "medusa" else f"identical to plain, {name}"
        yield row(label, [sum(same) / len(same)], "of answers", "medusa-chat bench")


def _hostile(
    context: BenchContext, by_name: dict[str, Contestant], prompts: list[list[int]]
) -> Iterator[Row]:
    """Medusa over plain decoding where nothing is foreseen, in a talk of such prompts alone: each
    answer stands behind one to the same prompt, so that it has nothing of a friendly one's to
    spend. The worst prompt counts."""
    context.progress("hostile prompts")
    ratios: list[list[float]] = [[] for _ in prompts]
    for number in range(OFTENER * context.rounds + 1):
        for found, ids in zip(ratios, prompts, strict=True):
            names = ("plain", "medusa") if number % 2 else ("medusa", "plain")
            seconds = dict.fromkeys(names, 0.0)
            for name in (*names, *reversed(names)):  # who comes first finds a cooler machine
                by_name[name].answer(ids)  # nobody changes drafters at every answer
                seconds[name] += by_name[name].answer(ids)[1]
            if number:
                found.append(seconds["plain"] / seconds["medusa"])
    worst = min(ratios, key=lambda values: median(values))
    yield row("worst hostile prompt", worst, "x", context.command, "plain", [1.0] * len(worst))
