"""Plain clock: times plain steps under the conditions of an answer, for a fair comparison."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from time import perf_counter

from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT

SHARE = 1 / 32  # of the answers' time that timing may take
ALWAYS = 0.2  # seconds that it may take after any answer
TOKENS = 36  # most tokens of an answer that are decoded again
COUNTED = 1 / 4  # the last steps; a small model's first twenty after drafted steps are slower
FEWEST = 2  # least number of steps that gives a time
OWN, LEAST_OWN = 1 / 2, 16  # of an answer's steps that were plain: more of them need no clock


def plain_step_seconds(
    loaded: LoadedModel,
    prompt_ids: Sequence[int],
    settings: GenerationSettings,
    last: Finished,
    own: Sequence[float] = (),
) -> float | None:
    """Mean seconds of a plain step as it would have been within the answer that ended with `last`;
    None if the answer is itself plain or too short, or if timing would take too long.

    The last tokens of the answer are decoded once more by plain steps, directly after it and with
    the same code path, settings, recording and text length. With exact acceptance they give the
    answer's own tokens, so the cache stays as it was. All timings together take about SHARE of the
    answers' time, or ALWAYS each.

    own: busy seconds of the answer's plain steps. Where most of its steps were plain, their mean
    counts instead: while the page draws an answer, steps take longer than after it. Where few were,
    each came alone between drafted steps, which is slower than plain decoding.

    Both are timed without the processor time of other programs; the answer's share of that time is
    then added to the plain step.
    """
    if settings.drafter == "none":
        return None
    spent, time = last.stats.seconds, loaded.plain
    beside = spent / (last.stats.busy_seconds or spent or 1.0)
    if len(own) >= max(LEAST_OWN, OWN * last.stats.steps):
        return mean(own) * beside
    time.allowed += SHARE * spent
    step = time.step or spent / max(1, last.stats.steps)  # an upper limit
    room = int(max(ALWAYS, time.allowed) / step) if step else 0
    count = min(TOKENS, len(last.token_ids) - 1, room)
    if count <= FEWEST:
        return None
    begun = perf_counter()
    ends = last.reason == "eos"  # then the last token was read too
    taken = steps_again(loaded, [*prompt_ids, *last.token_ids[:-count]], settings, count + ends)
    time.allowed = max(0.0, time.allowed - (perf_counter() - begun))
    if len(taken) < FEWEST:
        return None
    time.step = mean(taken[-max(FEWEST, int(COUNTED * len(taken))) :])
    return time.step * beside


def steps_again(
    loaded: LoadedModel, ids: Sequence[int], settings: GenerationSettings, count: int
) -> list[float]:
    """Busy seconds of each plain step of the `count` tokens after `ids`, an end token included."""
    plain = replace(settings, drafter="none", tree="none", nodes=1, max_new_tokens=count, stop=())
    engine = loaded.engine
    events = engine.generate(ids, engine.drafter(plain, ROOT), plain, texts=loaded.texts)
    return [event.busy_seconds for event in events if isinstance(event, Step)]
