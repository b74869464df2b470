"""Study "drafters": our decoding with every drafter, in turns on the same questions."""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial

from medusa_chat.bench.answers import (
    NO_STEP,
    AnswerFunction,
    Question,
    Run,
    fastest,
    fastest_of_rounds,
    page_run,
    parting,
    per_step,
    questions,
    rate,
)
from medusa_chat.bench.context import BenchContext
from medusa_chat.bench.rows import Row, row
from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import UsageError

PLAIN = "ours, plain"
OURS = {
    PLAIN: "none",
    "ours, prompt lookup": "prompt-lookup",
    "ours, medusa": "medusa",
    "ours, DFlash": "dflash",
    "ours, EAGLE": "eagle",
    "ours, Hydra": "hydra",
    "ours, MLP speculator": "mlp",
    "ours, draft model": "draft",
    "ours, auto": "auto",
}
COUNTED = "decoding without the prompt; of an answer the fastest round"


def drafters(context: BenchContext) -> Iterator[Row]:
    """Tokens a second and tokens a step of every drafter that the model has, at temperature 0, and
    how much of plain decoding's texts it gives."""
    asked, functions = questions(context), ours(context)
    found = fastest_of_rounds(context, asked, functions, context.rounds)
    yield from rows_of(asked, found, dict.fromkeys(functions, context.loaded.info.precision))


def ours(context: BenchContext) -> dict[str, AnswerFunction]:
    """Our decoding by each of OURS that the model has, with each of --nodes in every step where
    they are given; several stand in the names."""
    info = context.loaded.info
    own = {kind.name for kind in kinds.kinds_of(info.heads, info.beside)}
    made: dict[str, AnswerFunction] = {}
    for name, drafter in OURS.items():
        if drafter not in own | {kinds.NONE.name, kinds.AUTO}:
            continue
        for nodes in context.nodes or (None,):
            is_one = len(context.nodes) < 2 or drafter == kinds.NONE.name
            settings = settings_of(drafter, nodes)
            made[name if is_one else f"{name}, {nodes} nodes"] = partial(
                page_run, context, settings=settings
            )
    return made


def settings_of(drafter: str, nodes: int | None) -> GenerationSettings:
    return GenerationSettings(
        drafter=drafter, nodes=None if drafter == kinds.NONE.name else nodes, seed=0
    )


def rows_of(
    asked: Sequence[Question], found: Mapping[str, Sequence[Run]], notes: Mapping[str, str]
) -> Iterator[Row]:
    """The rows over the questions to which every program has a timed answer."""
    chosen = {name: fastest(runs) for name, runs in found.items()}
    timed = [q for q in map(id, asked) if all(q in runs for runs in chosen.values())]
    if not timed:
        raise UsageError(NO_STEP)
    best = {name: [runs[q] for q in timed] for name, runs in chosen.items()}
    for name, runs in best.items():
        yield _speed(name, runs, best[PLAIN], "; ".join((notes.get(name, ""), COUNTED)).strip("; "))
    for name, runs in best.items():
        if any(run.steps < run.stepped for run in runs):
            yield per_step(f"{name}: tokens a step", runs)
    for name, runs in best.items():
        yield _same_text(name, runs, best[PLAIN])


def _speed(name: str, runs: Sequence[Run], plain: Sequence[Run], note: str) -> Row:
    """Tokens per second over all answers; minimum and maximum are of single answers."""
    value = rate(runs)
    found = row(name, [run.rate for run in runs], "tokens/s", PLAIN, note=note, value=value)
    return {**found, "ratio": value / rate(plain)}


def _same_text(name: str, runs: Sequence[Run], plain: Sequence[Run]) -> Row:
    """The share of plain decoding's tokens that the answers have, up to the first that differs."""
    wanted = [len(base.tokens) for base in plain]
    places = [parting(run.tokens, base.tokens) for run, base in zip(runs, plain, strict=True)]
    alike = [n if at is None else at for at, n in zip(places, wanted, strict=True)]
    shares = [count / max(n, 1) for count, n in zip(alike, wanted, strict=True)]
    note = f"up to the first that differs; {places.count(None)} of {len(places)} whole answers"
    total = sum(alike) / max(sum(wanted), 1)
    return row(f"{name}: same tokens", shares, f"of {PLAIN}'s", note=note, value=total)
