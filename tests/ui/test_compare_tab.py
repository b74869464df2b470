"""The Compare tab without a browser: its events, and a comparison as data."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.gaps import with_gap
from support.races import SHORT, STORY, Racer, result
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.compare import Difference, Progress, add_gap, gap_request
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.session import Session
from medusa_chat.ui.compare import controller as compare_module
from medusa_chat.ui.compare.controller import CompareController, CompareTab
from medusa_chat.ui.compare.view import gap_text, lane_names, progress_view, result_view
from medusa_chat.ui.page.inputs import Inputs, checked
from medusa_chat.ui.page.pace import Pace
from medusa_chat.ui.page.status import waiting_text
from medusa_chat.ui.page.tree_view import to_line

NAMES = ("acceptance", "temperature", "tree", "max_new_tokens", "seed")
ASKED = ("exact", 0, "auto", 24, "7")


def inputs(text: object, asked=ASKED) -> Inputs:
    return checked({"text": text, **dict(zip(NAMES, asked, strict=True))}, ())


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(compare_module, "POLL_SECONDS", 0.01)
    made = Session(Racer(delay=0.004, prefill=0.01, steps=200))
    made.submit(LoadRequest())
    yield made
    made.close()


def pictures(
    controller: CompareController, tab: CompareTab, text: str = "hi", asked=ASKED
) -> list[dict]:
    """All that one click shows, parsed."""
    controller.begin(tab, inputs(text, asked))
    return list(looks(controller, tab))


def looks(controller: CompareController, tab: CompareTab) -> Iterator[dict]:
    """What the page sees until there is no more to see."""
    shown = {"more": True, "at": None}
    while shown["more"]:
        line = controller.look(tab, SimpleNamespace(_data={"at": shown["at"]}))[0]
        if isinstance(line, str):
            yield (shown := json.loads(line))
        time.sleep(0.001)


# ---- events ----


def test_one_click_runs_both_and_ends_with_the_result(session):
    shown = pictures(CompareController(session), CompareTab())
    assert [picture["state"] for picture in shown[:-2]] == ["running"] * (len(shown) - 2)
    told = " ".join(picture["status"] for picture in shown[:-2])
    assert "running plain (1 of 2)" in told and "running with the drafter (2 of 2)" in told
    sides = shown[-1]["result"]["sides"]
    assert [side["name"] for side in sides] == ["Plain", "Medusa"]
    assert shown[-1]["result"]["identical"]


def test_who_goes_first_alternates_whichever_tab_asks(session):
    controller, tabs = CompareController(session), [CompareTab(), CompareTab()]
    for tab in (*tabs, tabs[0]):
        pictures(controller, tab)
    asked = [s.drafter for s in session.runner.settings if s.max_new_tokens == 24]
    assert [drafter == "none" for drafter in asked] == [True, False, False, True, True, False]


@pytest.mark.parametrize(
    "text, asked, said",
    [
        ("  ", ASKED, "message is empty"),
        (None, ASKED, "give text"),
        ("hi", ("other", *ASKED[1:]), "Acceptance"),
        ("hi", ("exact", 9, *ASKED[2:]), "Temperature"),
        ("hi", ("exact", 0, "../x", 24, ""), "Tree"),
        ("hi", ("exact", 0, "auto", 1.5, ""), "Max new tokens is 1.5"),
        ("hi", ("exact", 0, "auto", None, ""), "Max new tokens is empty: give a whole number"),
        ("hi", ("exact", 0, "auto", 24, "x"), "Seed"),
    ],
)
def test_what_cannot_be_run_is_one_line_and_runs_nothing(session, text, asked, said):
    tab = CompareTab(result={"number": 3})
    with pytest.raises(UsageError) as refused:
        inputs(text, asked)
    line = json.loads(CompareController(session).refuse(tab, refused.value)[0])
    assert said in line["error"] and "\n" not in line["error"]
    assert line["result"] == {"number": 3}  # the last result stays on the page
    assert not tab.is_running and not session.runner.prompts


def test_a_failing_side_shows_its_reason_and_the_next_click_works(session):
    controller, tab = CompareController(session), CompareTab()
    session.runner.fail_at = 3
    assert "the script says" in pictures(controller, tab)[-1]["error"]
    session.runner.fail_at = None
    assert pictures(controller, tab)[-1]["result"]["number"] == 2


def test_stop_ends_the_running_side_and_keeps_the_last_result(session):
    controller, tab = CompareController(session), CompareTab()
    pictures(controller, tab)
    session.runner.delay = 0.05
    controller.begin(tab, inputs("hi"))
    for last in looks(controller, tab):
        if last.get("stage") == "running":
            controller.stop(tab)
    assert "stopped" in last["error"] and last["result"]["number"] == 1
    assert not tab.is_running
    session.runner.delay = 0.004
    assert pictures(controller, tab)[-1]["result"]["number"] == 3


def test_what_nobody_looks_at_any_more_is_stopped(session, monkeypatch):
    monkeypatch.setattr(compare_module, "GONE_SECONDS", 0.05)
    controller, tab = CompareController(session), CompareTab()
    session.runner.hold_at = 1
    controller.begin(tab, inputs("hi"))
    wait_for(lambda: not tab.is_running)
    assert "stopped" in json.loads(tab.line)["error"]
    session.runner.hold_at = None
    job = session.submit(Reply(STORY, replace(SHORT, max_new_tokens=1)))
    assert job.done.wait(240) and len(session.runner.prompts) <= 2


def test_a_look_says_only_what_the_page_does_not_have_yet(session):
    controller, tab = CompareController(session), CompareTab()
    last = pictures(controller, tab)[-1]
    assert not last["more"]
    assert json.loads(controller.look(tab)[0]) == last, "it may have been lost on the way"
    seen = SimpleNamespace(_data={"at": last["at"]})
    assert not any(isinstance(one, str) for one in controller.look(tab, seen))


def test_what_fails_unforeseen_is_told_and_ends_it(session, monkeypatch):
    monkeypatch.setattr(compare_module, "progress_view", lambda *seen: {}["missing"])
    controller, tab = CompareController(session), CompareTab()
    last = pictures(controller, tab)[-1]
    assert "unexpected KeyError" in last["error"] and not tab.is_running


def test_a_second_click_while_it_runs_changes_nothing(session):
    controller, tab = CompareController(session), CompareTab()
    controller.begin(tab, inputs("hi"))
    controller.begin(tab, inputs("other"))
    assert tab.text == "hi" and tab.number == 1


# ---- the clock of the race ----


@pytest.fixture
def loaded(session):
    """The session once its model, and so its tree, is known."""
    wait_for(lambda: session.state.model)
    return session


def asked_nodes(session) -> dict[str | None, int | None]:
    """What was asked for whole answers, by drafter."""
    return {s.drafter: s.nodes for s in session.runner.settings if s.max_new_tokens == 24}


def test_a_race_as_a_gpu_would_drafts_the_nodes_of_its_clock(loaded):
    controller, tab = CompareController(loaded), CompareTab()
    controller.set_pace(tab, SimpleNamespace(_data={"paced": True, "nodes": 20}))
    last = pictures(controller, tab)[-1]["result"]
    assert asked_nodes(loaded)[None] == 20 and last["show_nodes"] == 20
    controller.set_pace(tab, SimpleNamespace(_data={"paced": False, "nodes": None}))
    last = pictures(controller, tab)[-1]["result"]
    assert asked_nodes(loaded)[None] is None and last["show_nodes"] is None


def test_a_tree_that_was_chosen_is_raced_at_every_clock(loaded):
    controller, tab = CompareController(loaded), CompareTab()
    controller.set_pace(tab, SimpleNamespace(_data={"paced": True, "nodes": 20}))
    chosen = checked(
        {"text": "hi", **dict(zip(NAMES, ("exact", 0, "chain", 24, "7"), strict=True))}, ("chain",)
    )
    controller.begin(tab, chosen)
    assert tab.settings.tree == "chain" and tab.settings.nodes is None and tab.show_nodes is None


def test_without_a_choice_the_models_usual_pace_is_raced(loaded, monkeypatch):
    controller, tabs = CompareController(loaded), [CompareTab(), CompareTab()]
    controller.begin(tabs[0], inputs("hi"))
    monkeypatch.setattr(compare_module, "usual_pace", lambda session: Pace(True, 64))
    controller.begin(tabs[1], inputs("hi"))
    most = len(loaded.state.model.tree_facts.choices) + 1
    assert [tab.settings.nodes for tab in tabs] == [None, most]
    assert [tab.show_nodes for tab in tabs] == [None, 64]


def test_a_frame_has_the_nodes_of_its_step(session):
    plain, drafted = (side["frames"] for side in result_view(result(session))["sides"])
    assert [frame[3] for frame in plain] == [0] + [1] * (len(plain) - 1)
    assert [frame[3] for frame in drafted] == [0] + [16] * (len(drafted) - 1)


def test_a_result_says_whose_tokens_it_counts(session):
    found = result(session)
    assert result_view(found)["whose"] == "model"
    assert result_view(replace(found, model="demo"))["whose"] == "demo"


# ---- words ----


@pytest.mark.parametrize(
    "stage, ahead, loading, said",
    [
        ("waiting", 1, False, "waiting: 1 ahead"),
        ("waiting", 0, True, "waiting for the model: reading weights"),
        ("warming up", 0, False, "not counted"),
        ("running", 0, False, "running plain (1 of 2)"),
    ],
)
def test_progress_says_what_happens(session, stage, ahead, loading, said):
    session.lifecycle.state = (
        ModelState("loading", "read", note="/far/folder") if loading else ModelState("ready")
    )
    progress = Progress("plain", 1, stage, ahead)
    wait = waiting_text(session.state, ahead)
    assert said in progress_view(progress, 24, wait)["status"]


def timed(found, plain, drafted, first=(0.01, 0.01)):
    """A comparison of so many seconds: (plain, drafted) of the steps, and of what came before."""

    def of(side, seconds, first):
        stats = replace(side.stats, seconds=seconds, prefill_seconds=first)
        return replace(side, stats=stats, counted=stats)

    return replace(
        found,
        plain=of(found.plain, plain, first[0]),
        drafted=of(found.drafted, drafted, first[1]),
    )


def test_the_headline_follows_from_the_race_that_is_shown(session):
    found = result(session)
    view = result_view(timed(found, plain=0.431, drafted=0.392, first=(0.25, 0.052)))
    shown = {side["key"]: side["total_ms"] for side in view["sides"]}
    assert shown == {"plain": 681, "drafted": 444}
    assert view["verdict"].startswith(
        "Medusa is 1.53× as fast as plain decoding: 444 ms against 681 ms. The steps alone: 1.10×; "
        "the rest is the time to the first token, 52 ms against 250 ms, which no drafter changes."
    )
    assert view["is_race"] and not view["is_slower"]
    even = result_view(timed(found, plain=0.6, drafted=0.4))["verdict"]
    assert "1.49×" in even and "alone" not in even  # both of the same cause


def test_a_slower_drafter_is_called_slower_with_the_cause(session):
    found = result(session)
    seconds = found.plain.stats.seconds
    found = timed(found, plain=seconds, drafted=2 * seconds, first=(0.0, 0.0))
    view = result_view(found)
    assert view["is_slower"] and view["speedup"] == pytest.approx(0.5, rel=0.01)
    assert "slower than plain decoding here: 0.50×" in view["verdict"]
    assert f"{found.overhead:.2f} plain steps" in view["verdict"]


def test_two_drafters_are_named_in_what_runs_and_in_the_verdict(session):
    names = lane_names("prompt-lookup", "dflash")
    progress = progress_view(Progress("plain", 1, "running"), 24, "", names)
    assert "running with Prompt lookup (1 of 2)" in progress["status"]
    assert progress["names"] == ["Prompt lookup", "DFlash"]
    found = result(session, replace(SHORT, drafter="medusa"), against="prompt-lookup")
    view = result_view(found)
    assert "than Prompt lookup" in view["verdict"] or "as Prompt lookup" in view["verdict"]
    assert "Prompt lookup first" in view["how"] and view["base"] == "Prompt lookup"
    asked = {"drafter": "dflash", "against": "medusa", "text": "hi"}
    assert checked(asked, ()).against == "medusa"
    with pytest.raises(UsageError, match="Against is"):
        checked(asked | {"against": "oracle"}, ())


def test_answers_of_different_lengths_or_that_repeat_themselves_are_compared_per_token(session):
    found = timed(result(session), plain=0.6, drafted=0.4)
    longer = replace(found, drafted=replace(found.drafted, token_ids=(*found.drafted.token_ids, 1)))
    view = result_view(longer)
    assert not view["is_race"] and "per token, for the answers differ" in view["verdict"]
    session.runner.pieces = tuple("abcdefghijklmno")  # then the same again
    looped = result(session, replace(SHORT, max_new_tokens=60))
    assert looped.loop == 15 and looped.drafted.counted.steps < looped.drafted.stats.steps
    view = result_view(looped)
    assert not view["is_race"]
    assert "until the text repeats itself from token 16 on" in view["verdict"]


def test_an_overhead_below_one_is_noise(session):
    found = result(session)
    fast = found.plain.stats.seconds / found.plain.stats.steps * found.drafted.stats.steps * 0.9
    found = timed(found, plain=found.plain.stats.seconds, drafted=fast)
    assert found.overhead == pytest.approx(0.9) and found.speedup == found.acceleration_rate
    assert result_view(found)["is_noise"]


def test_a_difference_says_whether_it_was_to_be_expected(session):
    session.runner.differ_at = 5
    found = result(session)
    lossy = replace(found, settings=found.settings | {"acceptance": "typical", "temperature": 0.7})
    assert "should give the same text" in result_view(found)["difference"]["note"]
    assert "lossy: a difference is expected" in result_view(lossy)["difference"]["note"]
    half = replace(found, precision="bf16")
    assert "bf16 rounds" in result_view(half)["difference"]["note"]
    near = replace(half, difference=Difference(5, "a", "b", 0.001))
    assert "A near tie" in result_view(near)["difference"]["note"]


def test_the_gap_is_asked_where_the_answers_part(session):
    session.runner.differ_at = 5
    found = with_gap(session, result(session))
    (request,) = session.runner.peeks
    assert request.token_ids == (*found.prompt_token_ids, *found.plain.token_ids[:5])
    assert request.tokens == (found.plain.token_ids[5], found.drafted.token_ids[5])
    assert found.difference.gap == 0 and gap_text(found.difference).startswith("under 0.0001")


def test_no_gap_is_asked_of_another_model_or_where_there_is_none(session):
    found = result(session)
    assert gap_request(session, found) is None
    session.runner.differ_at = 5
    found = result(session)
    with pytest.raises(ModelError, match="another model"):
        gap_request(session, replace(found, model="other"))


def test_an_impossible_token_has_no_gap(session):
    session.runner.differ_at = 5
    found = result(session)
    peek = ScriptedRunner().peek(gap_request(session, found))
    none = tuple(ranked._replace(probability=0.0) for ranked in peek.asked)
    assert add_gap(found, replace(peek, asked=none)).difference.gap is None


def test_a_result_is_plain_json_without_an_open_tag(session):
    session.runner.pieces = ("<script>", "${x}", "😀")
    shown = pictures(CompareController(session), CompareTab())
    line = to_line(shown[-1])
    assert "<" not in line and json.loads(line) == shown[-1]


def test_what_other_programs_took_is_told_where_it_is_much(session):
    found = result(session)
    assert "Other programs" not in result_view(found)["how"]
    stats = replace(found.drafted.stats, busy_seconds=found.drafted.stats.seconds * 0.7)
    found = replace(found, drafted=replace(found.drafted, stats=stats))
    assert "Other programs took 30% of the time: the speedup" in result_view(found)["how"]
