"""Plain decoding beside an answer: like with like, and nothing of it stays."""

from dataclasses import replace

import pytest

from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.events import Stats, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import plain_clock
from medusa_chat.runtime import reply as replies
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.traces import from_json, to_json

TALK = [{"role": "user", "content": "Tell me a story"}]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(plain_clock, "ALWAYS", 10.0)  # whatever this machine does beside
    *_, (_, loaded) = load(LoadRequest("demo", precision="fp32", device="cpu"))
    return loaded


def answer(model, conversation=TALK, **settings):
    chosen = {"max_new_tokens": 48, "seed": 5, "tree": "sparse-8"} | settings
    return list(reply(model, Reply(conversation, GenerationSettings(**chosen))))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_an_answer_is_the_same_with_its_clock_and_without(model, monkeypatch, temperature):
    timed = answer(model, temperature=temperature)
    monkeypatch.setattr(replies, "plain_step_seconds", lambda *_: None)
    alone = answer(model, temperature=temperature)
    assert timed[-1].token_ids == alone[-1].token_ids and timed[-1].text == alone[-1].text
    paths = [[e.path for e in events if isinstance(e, Step)] for events in (timed, alone)]
    assert paths[0] == paths[1]


def test_the_end_of_the_answer_is_decoded_again_with_its_record(model, monkeypatch):
    told = []
    generate = model.engine.generate

    def watched(ids, drafter, settings, details=True, **more):
        told.append((list(ids), settings, details))
        return generate(ids, drafter, settings, details, **more)

    monkeypatch.setattr(model.engine, "generate", watched)
    *_, last = answer(model, temperature=0.7)
    (prompt, asked, _), (ids, plain, is_recorded) = told[-2:]
    count = plain.max_new_tokens - (last.reason == "eos")
    assert ids == [*prompt, *last.token_ids[:-count]] and is_recorded
    assert (plain.drafter, plain.temperature, plain.seed) == ("none", 0.7, asked.seed)
    assert last.stats.plain_step_seconds > 0
    read = last.token_ids if last.reason == "eos" else last.token_ids[:-1]
    assert model.engine._ids == [*prompt, *read]  # the cache is as it was


def test_the_next_turn_reads_only_what_is_new(model, monkeypatch):
    *_, last = answer(model)
    conversation = [
        *TALK,
        {"role": "assistant", "content": last.text},
        {"role": "user", "content": "Go"},
    ]
    timed, *_ = answer(model, conversation)
    monkeypatch.setattr(replies, "plain_step_seconds", lambda *_: None)
    model.engine.forget()
    answer(model)
    alone, *_ = answer(model, conversation)
    assert 0 <= alone.reused_tokens - timed.reused_tokens <= 1  # a last path may be longer


@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"max_new_tokens": 3}])
def test_plain_and_tiny_answers_are_not_timed(model, settings):
    assert answer(model, **settings)[-1].stats.plain_step_seconds is None


def test_slow_steps_are_timed_for_a_share_of_the_answers_time(model, monkeypatch):
    monkeypatch.setattr(plain_clock, "ALWAYS", 0.0)
    for share, allowed, is_timed in ((0, 0, False), (0, 0.25, True), (1e6, 0, True)):
        monkeypatch.setattr(plain_clock, "SHARE", share)
        model.plain.step = 0.05  # what the last timing found
        model.plain.allowed = allowed
        assert (answer(model)[-1].stats.plain_step_seconds is not None) == is_timed
        if is_timed and not share:
            assert model.plain.allowed < allowed  # what it took is spent


def test_a_trace_keeps_the_figure_and_an_older_one_is_read(model):
    *_, last = answer(model)
    values = to_json(last)
    assert from_json(values) == last
    del values["stats"]["plain_step_seconds"]
    assert from_json(values).stats.plain_step_seconds is None


def test_other_programs_slow_plain_steps_as_they_slowed_the_answer(model, monkeypatch):
    *_, last = answer(model)
    slower = replace(last.stats, seconds=3 * last.stats.seconds)
    ratios, settings = [], GenerationSettings(drafter="medusa", seed=5)
    monkeypatch.setattr(plain_clock, "steps_again", lambda *_: [0.01] * 12)
    for stats in (last.stats, slower):
        answered = replace(last, stats=stats)
        found = plain_clock.plain_step_seconds(model, [5], settings, answered)
        ratios.append(found / (stats.seconds / stats.steps))
    assert ratios[0] == pytest.approx(ratios[1])


def test_only_the_steps_count_as_busy_and_not_who_reads_them(model):
    now = iter(range(10**6))
    model.engine._busy = lambda: float(next(now))
    settings = GenerationSettings(drafter="none", max_new_tokens=12)
    steps = []
    for event in model.engine.generate([5, 9], model.engine.drafter(settings, ROOT), settings):
        steps += [event.busy_seconds] if isinstance(event, Step) else []
        next(now)  # the reader takes as long as a step
    assert len(steps) > 3 and set(steps) == {1.0} and event.stats.busy_seconds == len(steps)


def test_a_step_of_a_comparison_has_no_time_of_other_programs():
    stats = Stats.of(8, 4, 8, seconds=2.0, prefill_seconds=0.1)
    assert stats.step_seconds == 0.5
    assert replace(stats, busy_seconds=1.0).step_seconds == 0.25
    assert Stats.of(1, 0, 0, 0.0, 0.1).step_seconds is None


def test_an_answer_of_mostly_plain_steps_is_its_own_clock(model, monkeypatch):
    """While a page draws, steps take longer than after the answer: 0.89 was told for 1.05."""
    first, *_, last = answer(model)
    last = replace(last, stats=replace(last.stats, steps=40, seconds=2.0, busy_seconds=1.0))
    again = []
    monkeypatch.setattr(plain_clock, "steps_again", lambda *_: again.append(1) or [])

    def clocked(count: int) -> float | None:
        settings = GenerationSettings(drafter="medusa", seed=5)
        ids = first.prompt_token_ids
        return plain_clock.plain_step_seconds(model, ids, settings, last, [0.01] * count)

    assert clocked(20) == pytest.approx(0.02) and not again
    assert clocked(19) is None and again
