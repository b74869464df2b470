"""One prompt answered twice: what makes it fair, and what is made of the two recordings."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate

import pytest
from support.gaps import with_gap
from support.races import SHORT, STORY, Racer, race, result

from medusa_chat.decoding.events import DraftRecord, Finished, Prefilled, Stats, Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.messages import Fresh, LoadRequest
from medusa_chat.runtime.compare import WARM_UP_TOKENS, Comparison, Progress, Recording, compared
from medusa_chat.runtime.requests import Reply, Ticket
from medusa_chat.runtime.runner import InProcess
from medusa_chat.runtime.session import Session


@pytest.fixture
def scripted() -> Iterator[Session]:
    session = Session(Racer(delay=0.004, prefill=0.01, steps=200))
    session.submit(LoadRequest()).done.wait()
    yield session
    session.close()


@pytest.fixture(scope="module")
def demo() -> Iterator[Session]:
    session = Session(InProcess())
    list(session.lifecycle.run(LoadRequest("demo", device="cpu", precision="fp32")))
    yield session
    session.close()


def remember_jobs(session: Session, monkeypatch) -> list[Ticket]:
    """Every job given to the session from now on."""
    jobs, submit = [], session.submit
    monkeypatch.setattr(session, "submit", lambda *asked: jobs.append(submit(*asked)) or jobs[-1])
    return jobs


def ids_of(session: Session) -> tuple[int, ...]:
    """What the session says when asked once more."""
    job = session.submit(Reply(STORY, SHORT))
    assert job.done.wait(240) and not job.error, job.error
    return job.trace[-1].token_ids


# ---- fairness ----


def test_both_run_whole_one_after_the_other_behind_a_warm_up_of_each(scripted):
    seen = [p for p in race(scripted, STORY, SHORT) if isinstance(p, Progress)]
    order = list(dict.fromkeys((p.side, p.stage) for p in seen if p.stage != "waiting"))
    assert order == [
        ("plain", "warming up"),
        ("drafted", "warming up"),
        ("plain", "running"),
        ("drafted", "running"),
    ]
    asked = scripted.runner.settings
    assert [s.max_new_tokens for s in asked] == [WARM_UP_TOKENS, WARM_UP_TOKENS, 24, 24]
    assert [s.drafter for s in asked] == ["none", None] * 2
    assert all(isinstance(prompt, Fresh) for prompt in scripted.runner.prompts)


def test_the_two_sides_differ_in_nothing_but_the_drafter(scripted):
    settings = GenerationSettings(temperature=0.7, max_new_tokens=12)  # a seed is drawn
    found = result(scripted, settings)
    plain, drafted = scripted.runner.settings[-2:]
    assert plain.seed is not None and plain == replace(drafted, drafter="none")
    assert found.settings["seed"] == plain.seed


def test_the_caller_chooses_who_goes_first(scripted):
    for plain_first in (True, False):
        found = result(scripted, plain_first=plain_first)
        assert found.is_plain_first is plain_first
        assert [s.drafter == "none" for s in scripted.runner.settings[-2:]] == [
            plain_first,
            not plain_first,
        ]
        assert found.plain.drafter == "none" and found.drafted.drafter == "medusa"


def test_both_start_from_an_empty_cache_whatever_was_said_before(demo, monkeypatch):
    assert ids_of(demo)  # the cache now holds this very prompt
    for plain_first in (True, False):
        jobs = remember_jobs(demo, monkeypatch)
        result(demo, plain_first=plain_first)
        monkeypatch.undo()
        starts = [job.trace[0] for job in jobs]
        assert [start.reused_tokens for start in starts] == [0, 0, 0, 0]
        assert len({start.prompt_token_ids for start in starts}) == 1


def test_plain_against_plain_is_refused(scripted):
    with pytest.raises(UsageError, match="choose another drafter"):
        result(scripted, GenerationSettings(drafter="none"))


def test_two_drafters_are_raced_and_the_first_is_the_baseline(scripted):
    found = result(scripted, replace(SHORT, drafter="medusa"), against="prompt-lookup")
    assert [s.drafter for s in scripted.runner.settings[-2:]] == ["prompt-lookup", "medusa"]
    assert found.baseline.startswith("our decoding with Prompt lookup, ")
    left, right = found.plain.counted, found.drafted.counted
    assert left.acceleration_rate > 1, "the left side drafts, too"
    rates = [one.acceleration_rate / one.step_seconds for one in (left, right)]
    assert found.speedup == pytest.approx(rates[1] / rates[0])
    with pytest.raises(UsageError, match="both sides would be medusa"):
        result(scripted, replace(SHORT, drafter="medusa"), against="medusa")


def test_a_model_changed_in_between_is_refused(scripted):
    traces = [list(scripted.runner.run(Reply(STORY, SHORT))) for _ in range(2)]
    traces[1][0] = replace(traces[1][0], precision="bf16")
    with pytest.raises(MedusaChatError, match="model was changed"):
        compared(*traces)


# ---- figures ----


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_demo_says_the_same_on_both_sides_with_exact_acceptance(demo, temperature):
    found = result(demo, replace(SHORT, temperature=temperature))
    assert found.difference is None and not found.is_lossy
    assert found.plain.token_ids == found.drafted.token_ids
    assert found.drafted.stats.steps < found.plain.stats.steps
    assert found.baseline == "our plain decoding, fp32, cpu, same weights"


def _alone(side):
    """As where no other program ran: all of the time is this one's."""
    stats = replace(side.stats, busy_seconds=side.stats.seconds)
    return replace(side, stats=stats, counted=stats)


def test_speedup_is_acceleration_over_overhead_and_the_ratio_of_rates(demo):
    found = result(demo)
    assert found.speedup == pytest.approx(found.acceleration_rate / found.overhead)
    busy = [side.stats.busy_seconds for side in (found.plain, found.drafted)]
    assert found.speedup == pytest.approx(busy[0] / busy[1])  # as many tokens on both sides
    alone = replace(found, **{name: _alone(getattr(found, name)) for name in ("plain", "drafted")})
    assert alone.speedup == pytest.approx(found.wall_clock_ratio)
    assert found.plain.stats.acceleration_rate == 1


@pytest.mark.parametrize("side", ["plain", "drafted"])
def test_a_recording_is_the_answer_on_its_own_clock(demo, side):
    recording = getattr(result(demo), side)
    times = [frame.seconds for frame in recording.frames]
    assert times == sorted(times) and times[0] == recording.stats.prefill_seconds
    assert times[-1] == pytest.approx(recording.total_seconds)
    assert "".join(frame.text for frame in recording.frames) == recording.text
    assert sum(frame.tokens for frame in recording.frames) == len(recording.token_ids)
    assert "".join(recording.token_texts[:-1]) in recording.text


def test_the_last_token_of_a_recording_has_its_text_where_nothing_drafted_it():
    names = (*[(None, None)] * 6, ("a", "b"), "c")
    begin = Prefilled("m", "fp32", "cpu", {}, (1,), 1, 0, (2,), "a", 0.1)
    step = Step(0, (3, 4), "bc", 0.1, (0, 1), DraftRecord((2, 3), (-1, 0), *names))
    end = Finished("length", (2, 3, 4), "abc", "", Stats.of(3, 1, 2, 0.1, 0.1))
    assert Recording.of([begin, step, end]).token_texts == ("a", "b", "c")


def test_a_recording_shows_reasoning_before_what_is_said():
    stats = Stats.of(4, 2, 3, 0.2, 0.1)
    begin = Prefilled("m", "fp32", "cpu", {}, (1,), 1, 0, (2,), "", 0.1, reasoning="Hm")
    steps = [
        Step(0, (3, 4), "Yes", 0.1, (0,), reasoning=", so"),
        Step(1, (5,), " it is", 0.1, (0,)),
    ]
    end = Finished("length", (2, 3, 4, 5), "Yes it is.", ".", stats, "", "Hm, so")
    made = Recording.of([begin, *steps, end])
    assert [frame.text for frame in made.frames] == ["Hm", ", so\n\nYes", " it is", "."]
    assert made.text == "Hm, so\n\nYes it is."
    cut = Finished("length", (2,), "", "", stats, "", "Hm, ")
    assert Recording.of([begin, cut]).text == "Hm, "


def test_an_answer_without_a_step_has_no_speedup(scripted):
    found = result(scripted, replace(SHORT, max_new_tokens=1))
    assert found.difference is None
    assert (found.speedup, found.overhead, found.wall_clock_ratio) == (None, None, None)
    assert found.total_ratio == pytest.approx(1)


# ---- the first difference ----


@pytest.mark.parametrize("index", [1, 9, 23])
def test_a_planted_difference_is_found_at_its_token(scripted, index):
    scripted.runner.differ_at = index
    found = result(scripted)
    plain, drafted = found.plain.token_ids, found.drafted.token_ids
    assert found.difference.index == index and plain[:index] == drafted[:index]
    assert found.difference.plain == scripted.runner.pieces[plain[index]]
    offsets = list(accumulate(map(len, found.plain.token_texts), initial=0))
    assert found.plain.text[offsets[index] :].startswith(found.difference.plain)


def test_a_shorter_answer_parts_where_it_ends(scripted):
    traces = [
        list(scripted.runner.run(Reply(STORY, replace(SHORT, max_new_tokens=n)))) for n in (9, 6)
    ]
    found = compared(*traces)
    assert found.difference.index == 6 and found.difference.drafted == "end of text"
    assert found.difference.plain == scripted.runner.pieces[traces[0][-1].token_ids[6]]


def test_typical_acceptance_is_called_lossy_only_where_it_is(demo):
    typical = replace(SHORT, acceptance="typical", posterior_threshold=0.0)
    assert not result(demo, typical).is_lossy  # temperature 0: greedy
    found = result(demo, replace(typical, temperature=1.5, max_new_tokens=32))
    assert found.is_lossy and found.difference is not None
    at = found.difference.index
    assert found.plain.token_ids[:at] == found.drafted.token_ids[:at]
    assert found.plain.token_ids[at : at + 1] != found.drafted.token_ids[at : at + 1]
    asked = with_gap(demo, found).difference  # plain took the backbone's first choice
    assert asked.gap > 0 and (asked.plain, asked.drafted) == (
        found.difference.plain,
        found.difference.drafted,
    )


# ---- stop and failure ----


@pytest.mark.parametrize("place", [1, 2])
def test_closing_in_either_run_stops_it_and_leaves_the_model_usable(demo, place):
    whole = ids_of(demo)
    running = race(demo, STORY, replace(SHORT, max_new_tokens=400))
    for event in running:
        if event.stage == "running" and event.place == place and event.tokens:
            break
    running.close()
    assert ids_of(demo) == whole


def test_an_answer_stopped_from_outside_is_no_comparison(scripted, monkeypatch):
    scripted.runner.delay = 0.05
    jobs = remember_jobs(scripted, monkeypatch)
    running = race(scripted, STORY, SHORT)
    with pytest.raises(MedusaChatError, match="needs two finished answers"):
        for event in running:
            if event.stage == "running":
                scripted.cancel(jobs[-1])


def test_a_failing_side_is_told_in_its_own_words(scripted):
    scripted.runner.fail_at = 3
    with pytest.raises(MedusaChatError, match="the script says"):
        result(scripted)


def test_waiting_behind_another_answer_is_progress(scripted):
    scripted.runner.delay = 0.02
    other = scripted.submit(Reply("other", SHORT))
    running = race(scripted, STORY, replace(SHORT, max_new_tokens=2))
    first = next(running)
    assert (first.stage, first.ahead) == ("waiting", 1)
    assert isinstance(list(running)[-1], Comparison)
    assert other.done.is_set() and isinstance(other.trace[0], Prefilled)
