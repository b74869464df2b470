"""Plain clock: the time of a plain step beside an answer, so that like is compared with like."""

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean
from time import perf_counter

from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.events import Finished, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT

SHARE = 1 / 32  # of the time of answers that timing may take
MOMENT = 0.2  # seconds that it may take in any case, behind an answer
TOKENS = 36  # most of an answer that are decoded again
COUNTED = (
    1 / 4
)  # the last of them: for some twenty steps after drafted ones a small model's are slower
FEWEST = 2  # steps that are a measure


def plain_step_seconds(
    loaded: LoadedModel, prompt_ids: Sequence[int], settings: GenerationSettings, last: Finished
) -> float | None:
    """Mean seconds of a plain step as it would have been within the answer that ended with `last`;
    None where that is plain itself, too short, or timing would take too long.

    The last tokens of the answer are decoded once more, plainly: the steps have the path, settings,
    recording and length of text of the answer's own, directly after them. Where acceptance is exact
    they give the answer's tokens again, so that the cache stays as it was. All timings take about
    SHARE of the answers' time, or MOMENT each.

    Both are timed without what other programs took of the processor. As much of that as the answer
    had is then added to the plain step too.
    """
    spent, time = last.stats.seconds, loaded.plain
    time.allowed += SHARE * spent
    step = time.step or spent / max(1, last.stats.steps)  # at most
    room = int(max(MOMENT, time.allowed) / step) if step else 0
    count = min(TOKENS, len(last.token_ids) - 1, room)
    if settings.drafter == "none" or count <= FEWEST:
        return None
    begun = perf_counter()
    ends = last.reason == "eos"  # then the last token was read too
    taken = steps_again(loaded, [*prompt_ids, *last.token_ids[:-count]], settings, count + ends)
    time.allowed = max(0.0, time.allowed - (perf_counter() - begun))
    if len(taken) < FEWEST:
        return None
    time.step = mean(taken[-max(FEWEST, int(COUNTED * len(taken))) :])
    return time.step * spent / (last.stats.busy_seconds or spent)


def steps_again(
    loaded: LoadedModel, ids: Sequence[int], settings: GenerationSettings, count: int
) -> list[float]:
    """Busy seconds of each plain step of the `count` tokens after `ids`, an end token included."""
    plain = replace(settings, drafter="none", tree="none", nodes=1, max_new_tokens=count, stop=())
    engine = loaded.engine
    events = engine.generate(ids, engine.drafter(plain, ROOT), plain, texts=loaded.texts)
    return [event.busy_seconds for event in events if isinstance(event, Step)]
