"""Rooms, the desk's events and the settings, without a browser: who sees what, what is kept."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest
from support.conversations import TREES, ended, turn, wait_for

from medusa_chat.decoding.events import Step
from medusa_chat.errors import UsageError
from medusa_chat.ui.access.guard import GUEST, GUEST_HEADER
from medusa_chat.ui.chat import chat_session as room_module
from medusa_chat.ui.chat import session_store as rooms_module
from medusa_chat.ui.chat.answer import Answer, drawn_row, rows
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.controller import SETTINGS
from medusa_chat.ui.chat.reasoning_spans import said, spans, within
from medusa_chat.ui.chat.session_store import SessionStore
from medusa_chat.ui.chat.settings_panel import DEFAULTS, idle, restored
from medusa_chat.ui.chat.view import Tab, rows_of

POSTED = [{**DEFAULTS, "vanilla": False, "system": ""}[name] for name in SETTINGS]


def roles(room: ChatSession) -> list[str]:
    return [message["role"] for message in room.talk.messages]


def event(**data):
    return SimpleNamespace(_data=data)


async def watch(desk, tab, until=lambda: False):
    seen = []
    stream = desk.stream(tab)
    async for update in stream:
        seen.append(update)
        if until():
            await stream.aclose()
            break
    return seen


# ---- a room ----


def test_an_answer_is_committed_once_whatever_tabs_do(desk):
    tabs = [Tab(), Tab(), Tab()]
    desk.begin(tabs[0], "hi", *POSTED)
    for tab in tabs[1:]:
        desk.attach(tab, tabs[0].token)

    async def all_of_them():
        await asyncio.gather(*(watch(desk, tab) for tab in tabs))

    asyncio.run(all_of_them())
    room = desk.room_of(tabs[0])
    ended(room)
    for tab in tabs:
        desk.look(tab)
        desk.look(tab)
    assert roles(room) == ["user", "assistant"]
    assert room.talk.messages[1]["content"] == room.answer.finished.text


def test_a_tab_that_comes_in_mid_answer_sees_all_of_it(desk):
    first, second = Tab(), Tab()
    desk.begin(first, "hi", *POSTED)
    room = desk.room_of(first)
    asyncio.run(watch(desk, first, lambda: len(room.answer.steps) >= 5))
    view = desk.attach(second, first.token)
    assert second.token == first.token == json.loads(view.next)["token"]
    assert view.history[0]["content"][0]["text"] == "hi"
    updates = asyncio.run(watch(desk, second))
    live = updates[-1][0]
    assert all(live.startswith(update[0]) for update in updates)
    told = [json.loads(line) for line in live.splitlines()]
    text = "".join(part for line in told if isinstance(line, list) for part in line[1::2])
    ended(room)
    assert text == room.answer.finished.text == room.talk.messages[1]["content"]


def test_an_answer_goes_on_without_a_tab_and_ends_after_the_grace_time(desk, monkeypatch):
    monkeypatch.setattr(desk.session.runner, "delay", 0.05)
    monkeypatch.setattr(room_module, "GRACE_SECONDS", 0.6)
    tab = Tab()
    desk.begin(tab, "hi", *POSTED)
    room = desk.room_of(tab)
    asyncio.run(watch(desk, tab, lambda: len(room.answer.steps) >= 2))
    had = len(room.answer.steps)
    left = time.monotonic()
    ended(room)
    assert time.monotonic() - left > 0.5
    assert had < len(room.answer.steps) < 30 and room.talk.notes[1] == "stopped"


def test_a_clock_that_ticks_before_the_page_has_loaded_costs_no_conversation(desk):
    first, second = Tab(), Tab()
    desk.begin(first, "hi", *POSTED)
    assert desk.tick(second)["__type__"] == "update"
    desk.attach(second, first.token)
    assert desk.room_of(second) is desk.room_of(first)


def test_a_tab_that_looks_keeps_the_answer_alive(desk, monkeypatch):
    monkeypatch.setattr(desk.session.runner, "delay", 0.03)
    monkeypatch.setattr(room_module, "GRACE_SECONDS", 0.1)
    tab = Tab()
    desk.begin(tab, "hi", *POSTED)
    asyncio.run(watch(desk, tab))
    assert len(desk.room_of(tab).answer.steps) == 30


def test_other_browsers_never_see_a_room(desk):
    mine, theirs = Tab(), Tab()
    desk.begin(mine, "my secret", *POSTED)
    for token in (None, "", "x" * 32, mine.token[:-1], 7, ["a"], {"a": 1}):
        stranger = Tab()
        view = desk.attach(stranger, token)
        assert stranger.token != mine.token and "secret" not in repr(view)
        assert json.loads(view.next)["token"] == stranger.token
    desk.attach(theirs, None)
    assert desk.tick(theirs)["__type__"] == "update" and "secret" not in repr(desk.look(theirs))
    assert len(mine.token) >= 32


def test_a_message_sent_while_one_runs_waits_and_goes_out_at_the_end(room):
    room.ask(turn("one"))
    room.ask(turn("two"))
    room.ask(turn("dropped"))
    room.ask(turn("three"))
    assert [inputs.text for inputs in room.pending] == ["two", "dropped", "three"]
    room.drop(1)
    room.drop(7)
    room.enter()
    wait_for(lambda: len(room.talk.messages) == 6)
    ended(room)
    sent = [prompt[-1]["content"] for prompt in room.session.runner.prompts]
    assert sent == ["one", "two", "three"] and room.pending == []


def test_what_waits_goes_out_after_a_stop_too(room, monkeypatch):
    monkeypatch.setattr(room.session.runner, "delay", 0.05)
    room.ask(turn("one"))
    room.ask(turn("two"))
    room.enter()
    wait_for(lambda: room.session.runner.last)
    room.stop()
    wait_for(
        lambda: room._job and room._job.request.prompt[-1]["content"] == "two" and room._job.trace
    )
    room.stop()
    ended(room)
    assert [m["content"] for m in room.talk.messages if m["role"] == "user"] == ["one", "two"]


def test_a_crowd_of_waiting_messages_is_refused(room):
    room.ask(turn("one"))
    for number in range(room_module.MAX_PENDING):
        room.ask(turn(f"next {number}"))
    with pytest.raises(UsageError, match="wait already"):
        room.ask(turn("too many"))
    room.clear()


def test_one_room_has_one_job_and_rooms_take_turns(desk):
    one, two = desk.rooms.open(), desk.rooms.open()
    for at, room in enumerate((one, two)):
        room.enter()
        room.ask(turn(f"{at} a"))
    one.ask(turn("0 b"))
    assert desk._waiting_for(two._job) == "waiting: 1 ahead"
    wait_for(lambda: len(one.talk.messages) == 4 and len(two.talk.messages) == 2)
    ended(one)
    sent = [prompt[-1]["content"] for prompt in desk.session.runner.prompts]
    assert sent == ["0 a", "1 a", "0 b"]


def test_regenerate_replaces_the_answer_and_sends_the_same(room):
    room.ask(turn())
    ended(room)
    first = room.answer
    room.regenerate(turn(seed="11"))
    assert roles(room) == ["user"]
    ended(room)
    assert roles(room) == ["user", "assistant"]
    assert room.talk.answers == {1: room.answer} and room.answer is not first
    prompts = room.session.runner.prompts
    assert prompts[0] == prompts[1] and room.session.runner.settings[1].seed == 11


def test_a_regenerate_that_comes_to_nothing_gives_the_old_answer_back(room):
    room.ask(turn())
    ended(room)
    talk = room.talk
    room.session.runner.reply = lambda prompt, settings: iter(_raise())
    room.regenerate(turn())
    ended(room)
    assert room.talk == talk and "wanted failure" in room.error


def test_continue_keeps_the_text_and_puts_the_new_one_after_it(room):
    room.ask(turn(max_new_tokens=30))
    ended(room)
    before = room.talk.messages[1]["content"]
    assert "limit of new tokens" in room.talk.notes[1]
    room.proceed(turn())
    assert room.answer.live.startswith(f"[1,{json.dumps(room.answer.pieces[0][0])}")
    ended(room)
    prompt = room.session.runner.prompts[-1]
    assert prompt[-1] == {"role": "assistant", "content": before}
    after = room.talk.messages[1]["content"]
    assert after == before + room.answer.finished.text and len(after) > len(before)
    assert "".join(text for text, _ in room.answer.pieces) == after and not room.talk.notes


def test_undo_gives_the_turn_back(room):
    room.ask(turn("first"))
    ended(room)
    room.ask(turn("second"))
    ended(room)
    assert room.undo() == "second" and roles(room) == ["user", "assistant"]
    assert room.undo() == "first" and roles(room) == [] and room.talk.answers == {}
    with pytest.raises(UsageError, match="nothing to undo"):
        room.undo()


def test_an_edited_question_drops_what_came_after_it_and_is_sent(room):
    for text in ("first", "second"):
        room.ask(turn(text))
        ended(room)
    room.edit(0, turn("changed"))
    ended(room)
    assert [m["content"] for m in room.talk.messages if m["role"] == "user"] == ["changed"]
    assert room.session.runner.prompts[-1] == [{"role": "user", "content": "changed"}]


def test_an_edited_answer_stays_as_edited_and_nothing_is_sent(room):
    for text in ("first", "second"):
        room.ask(turn(text))
        ended(room)
    room.edit(1, turn("my own words"))
    assert not room.is_running and len(room.session.runner.prompts) == 2
    assert room.talk.messages[1]["content"] == "my own words" and len(room.talk.messages) == 4
    assert set(room.talk.answers) == {3}


@pytest.mark.parametrize("act", ["regenerate", "proceed", "edit", "undo"])
def test_nothing_of_the_past_changes_while_an_answer_runs(room, act):
    room.ask(turn())
    arguments = {"edit": (0, turn("x")), "undo": ()}.get(act, (turn(),))
    with pytest.raises(UsageError, match="still running"):
        getattr(room, act)(*arguments)
    assert roles(room) == ["user"] and room.pending == []
    room.clear()


def test_clear_ends_the_answer_and_keeps_the_system_prompt(room):
    room.ask(turn(system="be brief"))
    room.ask(turn("next"))
    job = room._job
    room.clear()
    assert job.is_cancelled and roles(room) == [] and room.pending == []
    assert not room.is_running and room.system == "be brief"
    assert job.done.wait(10)
    room.ask(turn("again", system="be brief"))
    ended(room)
    assert roles(room) == ["user", "assistant"]
    assert room.session.runner.prompts[-1][0] == {"role": "system", "content": "be brief"}


def _raise():
    raise UsageError("wanted failure")
    yield


def test_a_failure_before_any_text_gives_the_messages_back(desk):
    desk.session.runner.reply = lambda prompt, settings: iter(_raise())
    tab = Tab()
    desk.begin(tab, "keep me", *POSTED)
    room = desk.room_of(tab)
    ended(room)
    assert room.talk.messages == ()
    view = desk.look(tab, "typed since")
    assert view.box == "keep me\n\ntyped since" and "wanted failure" in view.live
    assert desk.look(tab).box["__type__"] == "update"  # given back once


def test_a_failure_in_the_middle_keeps_the_text_and_gives_back_what_waits(room):
    room.session.runner.fail_at = 5
    room.ask(turn("one"))
    room.ask(turn("two"))
    room.enter()
    ended(room)
    assert room.talk.messages[1]["content"]
    assert room.talk.notes[1].startswith("stopped: the script says")
    assert "the script says" in room.error and room.take_returned() == "two"


def test_rooms_end_by_age_and_by_number(desk, monkeypatch):
    monkeypatch.setattr(rooms_module, "MAX_ROOMS", 3)
    rooms = SessionStore(desk.session, lambda answer: None)
    made = [rooms.open() for _ in range(3)]
    made[1].seen_at -= 10
    rooms.open()
    assert rooms.find(made[1].token) is None and rooms.find(made[0].token) is made[0]
    made[0].seen_at -= room_module.IDLE_SECONDS + 1
    rooms.open()
    assert rooms.find(made[0].token) is None


def test_steps_of_old_answers_are_let_go(desk, monkeypatch):
    monkeypatch.setattr(rooms_module, "MAX_STEPS_KEPT", 70)
    room = desk.rooms.open()
    for _ in range(3):
        room.ask(turn())
        ended(room)
    assert [len(room.talk.answers[place].steps) for place in (1, 3, 5)] == [0, 30, 30]
    assert room.talk.answers[1].pieces  # the tint is still there


# ---- the desk ----


def test_a_bad_setting_is_one_line_and_queues_nothing(desk):
    tab = Tab()
    posted = [3 if name == "temperature" else v for name, v in zip(SETTINGS, POSTED, strict=True)]
    view = desk.begin(tab, "hi", *posted)
    assert "temperature" in view.live and desk.session.runner.prompts == []
    assert desk.room_of(tab).talk.messages == ()


def test_a_second_tab_is_told_and_draws_only_what_is_new(desk):
    one, two = Tab(), Tab()
    desk.attach(one, None)
    desk.attach(two, one.token)
    assert desk.tick(two)["__type__"] == "update"
    desk.begin(one, "hi", *POSTED)
    assert json.loads(desk.tick(two))["ask"] == "look"
    view = desk.look(two)
    assert len(view.history) == 1 and json.loads(view.next)["ask"] == "follow"
    asyncio.run(watch(desk, two))
    ended(desk.room_of(two))
    view = desk.look(two)
    assert len(view.history) == 2 and view.text == ""
    done = {"done": desk.room_of(two).talk.messages[1]["content"]}
    assert json.loads(view.live) == done  # for a screen reader, once
    assert desk.attach(Tab(), one.token).live == ""
    again = desk.look(two)
    assert isinstance(again.history, dict) and isinstance(again.tint, dict)  # skipped


def test_a_new_chat_in_mid_answer_leaves_nothing_of_it_on_the_page(desk):
    tab = Tab()
    desk.begin(tab, "hi", *POSTED)

    async def cleared():
        async for _ in desk.stream(tab):
            if tab.talk_version == desk.room_of(tab).talk_version:
                desk.clear(tab)  # the browser asks for it while the stream is open

    asyncio.run(cleared())
    view = desk.look(tab)
    assert (view.live, view.text) == ("", "")
    again = desk.look(tab)
    assert isinstance(again.live, dict) and isinstance(again.text, dict)  # skipped


def test_an_update_stays_small_however_long_the_conversation_is(desk):
    tab = Tab()
    desk.begin(tab, "hi", *POSTED)
    room = desk.room_of(tab)
    ended(room)
    talk = room.talk
    for _ in range(40):
        talk = talk.plus("user", "x" * 2000).plus("assistant", "y" * 2000)
    room.talk = talk
    desk.begin(tab, "more", *POSTED)
    updates = asyncio.run(watch(desk, tab))
    assert max(len(update.live + update.text + update.panel) for update in updates) < 20_000


def test_a_row_maps_to_its_message_and_only_words_are_edited(desk):
    runner = desk.session.runner
    runner.pieces = ("<think>", "so", "</think>", "Yes", " it", " is")
    runner.steps = 2
    tab = Tab()
    desk.begin(tab, "hi", *POSTED)
    room = desk.room_of(tab)
    ended(room)
    kinds = [row.kind for row in rows_of(room.talk)]
    assert kinds[:2] == ["text", "thought"]
    before = room.talk
    desk.edit(tab, event(index=1, value="other thoughts"), *POSTED)
    desk.edit(tab, event(index=99, value="x"), *POSTED)
    desk.edit(tab, event(index=[0, 1], value="x"), *POSTED)
    desk.edit(tab, event(), *POSTED)
    assert room.talk is before
    view = desk.edit(tab, event(index=2, value="No"), *POSTED)
    assert room.talk.messages[1]["content"] == "No" and len(view.history) == 2
    desk.edit(tab, event(index=0, value="hello"), *POSTED)
    ended(room)
    assert room.talk.messages[0]["content"] == "hello" and len(room.talk.messages) == 2


def test_a_click_on_an_earlier_answer_shows_its_steps(desk):
    tab = Tab()
    for text in ("one", "two"):
        desk.begin(tab, text, *POSTED)
        ended(desk.room_of(tab))
    desk.look(tab)
    first = desk.room_of(tab).talk.answers[1]
    panel = desk.choose(tab, event(index=1))
    assert json.loads(panel)["answer"] == first.number and desk.answer_of(tab) is first
    assert json.loads(desk.pick(tab, event(step=4)))["step"]["index"] == 4
    desk.begin(tab, "three", *POSTED)
    assert desk.answer_of(tab) is desk.room_of(tab).answer


def test_pieces_of_the_tint_are_sent_once_and_cover_the_words(desk):
    tab = Tab()
    desk.begin(tab, "one", *POSTED)
    room = desk.room_of(tab)
    ended(room)
    first = json.loads(desk.look(tab).tint)
    (key,) = first["new"]
    assert first["rows"] == [[1, key]]
    assert "".join(first["new"][key][1::2]) == room.talk.messages[1]["content"]
    desk.begin(tab, "two", *POSTED)
    ended(room)
    second = json.loads(desk.look(tab).tint)
    assert len(second["rows"]) == 2 and key not in second["new"] and len(second["new"]) == 1


def test_the_plain_rate_is_kept_for_the_model(desk):
    tab = Tab()
    desk.begin(tab, "hi", True, *POSTED[1:])
    ended(desk.room_of(tab))
    plain = desk.answer_of(tab)
    desk.begin(tab, "hi", *POSTED)
    ended(desk.room_of(tab))
    assert desk.plain_of(desk.answer_of(tab)) == plain.plain_rate
    desk.measured_plain(plain.model_key, 123.0)
    assert desk.plain_of(desk.answer_of(tab)) == 123.0


# ---- thoughts ----


@pytest.mark.parametrize(
    ("text", "words", "thoughts"),
    [
        ("plain", ["plain"], []),
        ("<think>a</think>b", ["b"], ["a"]),
        ("a</think>b", ["b"], ["a"]),
        ("x<think>a</think>y<think>b</think>", ["x", "y"], ["a", "b"]),
        ("<think>never ends", [], ["never ends"]),
        ("<think></think>b", ["b"], []),
    ],
)
def test_thoughts_are_told_from_words(text, words, thoughts):
    found = spans(text)
    assert [text[s.start : s.end] for s in found if not s.is_thought] == words
    assert [text[s.start : s.end] for s in found if s.is_thought and s.end > s.start] == thoughts
    assert said(text) == "".join(words)


def test_half_a_tag_is_not_shown_while_it_comes():
    assert [said("ab<think>"[:n]) for n in range(1, 10)] == ["a", "ab"] + ["ab"] * 7
    assert said("a < b") == "a < b"


def test_pieces_are_cut_at_the_span():
    text = "<think>ab</think>cde"
    pieces = [("<thi", 2), ("nk>ab</th", 3), ("ink>c", 1), ("de", 4)]
    thought, words = spans(text)
    assert list(within(pieces, thought)) == [("ab", 3)]
    assert list(within(pieces, words)) == [("c", 1), ("de", 4)]


def test_a_note_is_text_whatever_is_in_it():
    drawn = [
        drawn_row(row, "user") for row in rows(({"role": "user", "content": "x"},), {0: "<b>*"}, {})
    ]
    assert drawn[1]["content"][0]["text"] == '<span class="answer-note">&#60;b&#62;&#42;</span>'


def test_an_empty_answer_has_a_row():
    (row,) = rows(({"role": "assistant", "content": ""},), {}, {0: Answer()})
    assert row.kind == "note" and "at once" in row.text


# ---- settings ----


@pytest.mark.parametrize(
    ("chosen", "off"),
    [
        ({}, {"posterior_threshold", "locked", "posterior_alpha"}),
        (
            {"temperature": 0},
            {"acceptance", "top_p", "top_k", "seed", "locked"}
            | {"posterior_threshold", "posterior_alpha"},
        ),
        ({"acceptance": "typical"}, {"top_p", "top_k", "seed", "posterior_alpha"}),
        ({"acceptance": "typical", "locked": False}, {"top_p", "top_k", "seed"}),
        ({"acceptance": "typical-sampled", "locked": False}, {"top_p", "top_k"}),
        (
            {"vanilla": True},
            {"drafter", "tree", "nodes", "posterior_threshold", "locked", "posterior_alpha"},
        ),
        (
            {"drafter": "prompt-lookup"},
            {"tree", "posterior_threshold", "locked", "posterior_alpha"},
        ),
    ],
)
def test_what_does_nothing_is_off_and_says_why(chosen, off):
    why = idle({**DEFAULTS, "vanilla": False, **chosen})
    assert set(why) == off and all(why.values())


def test_what_a_browser_remembers_is_checked_value_by_value():
    kept = {"temperature": 9, "top_p": 0.5, "tree": "../x", "seed": "5", "vanilla": True, "x": 1}
    assert restored(kept, TREES) == {**DEFAULTS, "top_p": 0.5, "seed": "5"}
    for nothing in (None, "x", [1], 3):
        assert restored(nothing, TREES) == DEFAULTS


def test_the_steps_of_an_answer_are_its_pieces(desk):
    room = desk.rooms.open()
    room.ask(turn())
    ended(room)
    steps = [event for event in room.answer.steps if isinstance(event, Step)]
    assert room.answer.pieces[1:] == [(step.text, len(step.token_ids)) for step in steps]


@pytest.mark.parametrize("is_owner", [True, False])
def test_only_the_owners_answers_are_learnt_from(desk, is_owner):
    learnt = []
    desk.rooms.learn = learnt.append
    room, visitor = desk.rooms.open(), SimpleNamespace(headers={}, username=None)
    if not is_owner:
        visitor = SimpleNamespace(headers={GUEST_HEADER: "1"}, username=GUEST)
    desk.attach(Tab(), room.token, visitor)
    room.ask(turn("hello"))
    ended(room)
    assert learnt == ([room.answer] if is_owner else [])
