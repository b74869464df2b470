"""A scripted model whose plain and drafted answers are told apart."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from time import sleep

from medusa_chat.decoding.events import Finished, Stats, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.runtime.compare import Comparison, Progress, compare
from medusa_chat.runtime.session import Session
from support.scripted import ScriptedRunner

SHORT = GenerationSettings(max_new_tokens=24, seed=7)
STORY = [{"role": "user", "content": "Tell me a story about a fox"}]


class Racer(ScriptedRunner):
    """A script of exactly `max_new_tokens` tokens. differ_at: where a drafted answer goes wrong."""

    differ_at: int | None = None

    def reply(self, prompt, settings):
        count, ids, text = 0, [], ""
        seconds, steps, emitted = 0.0, 0, 0
        for event in super().reply(prompt, replace(settings, max_new_tokens=10_000)):
            if isinstance(event, Finished):
                yield event  # cancelled
                return
            if isinstance(event, Step):
                event = self._cut(event, settings, count)
                seconds, steps = seconds + event.seconds, steps + 1
                emitted += len(event.token_ids)
            self.settings[-1] = settings
            count += len(event.token_ids)
            ids += event.token_ids
            text += event.text
            yield event
            if count >= settings.max_new_tokens:
                break
        stats = Stats.of(count, steps, emitted, seconds, self.prefill)
        yield Finished("length", tuple(ids), text, "", stats)

    def _cut(self, step, settings, count):
        ids = list(step.token_ids[: settings.max_new_tokens - count])
        place = -1 if self.differ_at is None else self.differ_at - count
        if settings.drafter != "none" and 0 <= place < len(ids):
            ids[place] = (ids[place] + 1) % len(self.pieces)
        text = "".join(self.pieces[token] for token in ids)
        return replace(step, token_ids=tuple(ids), text=text)


def race(*asked, **options) -> Iterator[Progress | Comparison]:
    """compare(), with a pause after each event."""
    with closing(compare(*asked, **options)) as events:
        for event in events:
            yield event
            sleep(0.005)


def result(session: Session, settings: GenerationSettings = SHORT, **options) -> Comparison:
    *_, last = race(session, STORY, settings, **options)
    assert isinstance(last, Comparison)
    return last
