"""Chat sessions, their events and settings, without a browser: who sees what, what is kept."""

import asyncio
import json
import time
from types import SimpleNamespace

import gradio as gr
import pytest
from support.conversations import TREES, ended, known, owner, turn
from support.waiting import wait_for

from medusa_chat.decoding.events import Step
from medusa_chat.errors import UsageError
from medusa_chat.ui.access.guard import GUEST, GUEST_HEADER
from medusa_chat.ui.chat import chat_session as session_module
from medusa_chat.ui.chat import session_store as store_module
from medusa_chat.ui.chat import viewer
from medusa_chat.ui.chat.answer import Answer, chatbot_row, rows
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.reasoning_spans import pieces_within, spans, visible_text
from medusa_chat.ui.chat.session_store import OWNER, SessionStore
from medusa_chat.ui.chat.setting_components import DEFAULTS, idle
from medusa_chat.ui.chat.settings_panel import build_settings, restored
from medusa_chat.ui.chat.step_panel import figures
from medusa_chat.ui.chat.view import Tab, rows_of


def post(act, refuse, tab, text="hi", event=None, **settings):
    """What a browser posts, through the same handler: a message, or an event's own fields."""
    with gr.Blocks():
        state, box = gr.State(), gr.Textbox()
        panel = build_settings(TREES, gr.Checkbox(), gr.Textbox(), state)
    sources = {"text": box} if event is None else {"text": "value", "row": "index"}
    posted = {state: tab, box: text} | {panel.components[n]: v for n, v in settings.items()}
    return panel.handler(act, refuse, state, **sources)(posted, event)


def roles(chat: ChatSession) -> list[str]:
    return [message["role"] for message in chat.transcript.messages]


def event(**data):
    return SimpleNamespace(_data=data)


def guest():
    return SimpleNamespace(headers={GUEST_HEADER: "1"}, username=GUEST)


async def watch(controller, tab, until=lambda: False):
    seen = []
    stream = controller.stream(tab)
    async for update in stream:
        seen.append(update)
        if until():
            await stream.aclose()
            break
    return seen


# ---- a chat ----


def test_an_answer_is_committed_once_whatever_tabs_do(controller):
    tabs = [owner(), owner(), owner()]
    controller.send(tabs[0], turn("hi"))
    for tab in tabs[1:]:
        controller.attach(tab, known(tabs[0]))

    async def all_of_them():
        await asyncio.gather(*(watch(controller, tab) for tab in tabs))

    asyncio.run(all_of_them())
    chat = controller.session_of(tabs[0])
    ended(chat)
    for tab in tabs:
        controller.refresh(tab)
        controller.refresh(tab)
    assert roles(chat) == ["user", "assistant"]
    assert chat.transcript.messages[1]["content"] == chat.answer.finished.text


def test_a_tab_that_comes_in_mid_answer_sees_all_of_it(controller):
    first, second = owner(), owner()
    controller.send(first, turn("hi"))
    chat = controller.session_of(first)
    asyncio.run(watch(controller, first, lambda: len(chat.answer.steps) >= 5))
    view = controller.attach(second, known(first))
    shown = json.loads(view.next)["conversation"]
    assert second.conversation == first.conversation == shown
    assert view.history[0]["content"][0]["text"] == "hi"
    updates = asyncio.run(watch(controller, second))
    live = updates[-1][0]
    assert all(live.startswith(update[0]) for update in updates)
    told = [json.loads(line) for line in live.splitlines()]
    text = "".join(part for line in told if isinstance(line, list) for part in line[1::2])
    ended(chat)
    assert text == chat.answer.finished.text == chat.transcript.messages[1]["content"]


def test_an_answer_goes_on_without_a_tab_and_ends_after_the_grace_time(controller, monkeypatch):
    monkeypatch.setattr(controller.session.runner, "steps", 10_000)
    monkeypatch.setattr(session_module, "GRACE_SECONDS", 600)
    tab = owner()
    controller.send(tab, turn("hi"))
    chat = controller.session_of(tab)
    asyncio.run(watch(controller, tab, lambda: len(chat.answer.steps) >= 2))
    had = len(chat._job.trace)
    wait_for(lambda: len(chat._job.trace) > had)
    monkeypatch.setattr(session_module, "GRACE_SECONDS", 0)
    ended(chat)
    assert had < len(chat.answer.steps) < 10_000 and chat.transcript.notes[1] == "stopped"


def test_a_clock_that_ticks_before_the_page_has_loaded_costs_no_conversation(controller):
    first, second = owner(), owner()
    controller.send(first, turn("hi"))
    assert controller.tick(second)["__type__"] == "update"
    controller.attach(second, known(first))
    assert controller.session_of(second) is controller.session_of(first)


def test_a_tab_that_looks_keeps_the_answer_alive(controller, monkeypatch):
    monkeypatch.setattr(controller.session.runner, "delay", 0.03)
    monkeypatch.setattr(session_module, "GRACE_SECONDS", 0.1)
    tab = owner()
    controller.send(tab, turn("hi"))
    asyncio.run(watch(controller, tab))
    assert len(controller.session_of(tab).answer.steps) == 30


def test_other_guests_never_see_a_conversation(controller):
    mine, owners = Tab(), owner()
    controller.attach(mine, None, guest())
    controller.send(mine, turn("my secret"))
    assert mine.scope not in ("", OWNER) and len(mine.scope) >= 32
    names = ("tab", "last", "guest")
    forged = [None, "", 7, "[]", "{", json.dumps({"guest": mine.scope[:-1]})]
    forged += [json.dumps(dict.fromkeys(names, mine.conversation))]
    forged += [json.dumps({"tab": mine.conversation, "guest": OWNER})]
    for posted in forged:
        stranger = Tab()
        view = controller.attach(stranger, posted, guest())
        assert stranger.scope not in (mine.scope, OWNER) and "secret" not in repr(view)
        assert json.loads(view.next)["conversation"] != mine.conversation
    controller.attach(owners, known(mine))
    assert controller.tick(owners)["__type__"] == "update"
    assert "secret" not in repr(controller.refresh(owners))


def test_a_guest_never_reaches_a_conversation_of_the_owner(controller):
    mine, theirs = owner(), Tab()
    controller.send(mine, turn("my secret"))
    ended(controller.session_of(mine))
    view = controller.attach(theirs, known(mine), guest())
    assert theirs.scope != OWNER and "secret" not in repr(view)
    id = mine.conversation
    for act in ("open", "delete", "restore", "rename"):
        posted = event(id=id, title="taken")
        view = getattr(controller, f"{act}_conversation")(theirs, posted)
        assert "secret" not in repr(view) and theirs.conversation != id
    found = controller.search_conversations(theirs, event(search="my"))
    assert json.loads(found.conversations)["rows"] == [] and "secret" not in repr(found)
    (entry,) = controller.list.entries(OWNER)[0]
    assert (entry.id, entry.title) == (id, "my secret")


def test_a_tab_that_has_not_come_reaches_nothing(controller):
    mine, unknown = owner(), Tab()
    controller.send(mine, turn("my secret"))
    view = controller.open_conversation(unknown, event(id=mine.conversation))
    assert unknown.scope not in ("", OWNER) and "secret" not in repr(view)


def test_a_guest_finds_the_same_conversations_again(controller):
    first, again = Tab(), Tab()
    controller.attach(first, None, guest())
    controller.send(first, turn("hi"))
    ended(controller.session_of(first))
    controller.attach(again, known(first), guest())
    assert controller.session_of(again) is controller.session_of(first)
    controller.sessions.end_guests()
    later = Tab()
    controller.attach(later, known(first), guest())
    assert controller.session_of(later).is_empty and later.scope != first.scope


def test_a_message_sent_while_one_runs_waits_and_goes_out_at_the_end(chat):
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.ask(turn("dropped"))
    chat.ask(turn("three"))
    assert [inputs.text for inputs in chat.pending] == ["two", "dropped", "three"]
    chat.drop(1)
    chat.drop(7)
    chat.enter()
    wait_for(lambda: len(chat.transcript.messages) == 6)
    ended(chat)
    sent = [prompt[-1]["content"] for prompt in chat.session.runner.prompts]
    assert sent == ["one", "two", "three"] and chat.pending == []


def test_what_waits_goes_out_after_a_stop_too(chat, monkeypatch):
    monkeypatch.setattr(chat.session.runner, "delay", 0.05)
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.enter()
    wait_for(lambda: chat.session.runner.last)
    chat.stop()
    wait_for(
        lambda: chat._job and chat._job.request.prompt[-1]["content"] == "two" and chat._job.trace
    )
    chat.stop()
    ended(chat)
    assert [m["content"] for m in chat.transcript.messages if m["role"] == "user"] == ["one", "two"]


def test_a_crowd_of_waiting_messages_is_refused(chat):
    chat.ask(turn("one"))
    for number in range(session_module.MAX_PENDING):
        chat.ask(turn(f"next {number}"))
    with pytest.raises(UsageError, match="wait already"):
        chat.ask(turn("too many"))
    chat.end()


def test_one_room_has_one_job_and_rooms_take_turns(controller):
    one, two = controller.sessions.open(), controller.sessions.open()
    for at, chat in enumerate((one, two)):
        chat.enter()
        chat.ask(turn(f"{at} a"))
    one.ask(turn("0 b"))
    assert controller._waiting_for(two._job) == "waiting: 1 ahead"
    wait_for(lambda: len(one.transcript.messages) == 4 and len(two.transcript.messages) == 2)
    ended(one)
    sent = [prompt[-1]["content"] for prompt in controller.session.runner.prompts]
    assert sent == ["0 a", "1 a", "0 b"]


def test_regenerate_keeps_the_earlier_version_and_sends_the_same(chat):
    chat.ask(turn())
    ended(chat)
    first = chat.answer
    chat.regenerate(turn(seed="11"))
    assert roles(chat) == ["user"]
    ended(chat)
    assert roles(chat) == ["user", "assistant"]
    assert chat.transcript.answers == {1: chat.answer} and chat.answer is not first
    prompts = chat.session.runner.prompts
    assert prompts[0] == prompts[1] and chat.session.runner.settings[1].seed == 11
    assert chat.transcript.version(1) == (2, 2)
    chat.show_version(1, 1)
    assert chat.transcript.answers == {1: first} and chat.answer is first
    for wrong in (0, 3):
        with pytest.raises(UsageError, match="not there any more"):
            chat.show_version(1, wrong)


def test_a_regenerate_that_comes_to_nothing_gives_the_old_answer_back(chat):
    chat.ask(turn())
    ended(chat)
    transcript = chat.transcript
    chat.session.runner.reply = lambda prompt, settings: iter(_raise())
    chat.regenerate(turn())
    ended(chat)
    assert chat.transcript == transcript and "wanted failure" in chat.error


def test_continue_keeps_the_text_and_puts_the_new_one_after_it(chat):
    chat.ask(turn(max_new_tokens=30))
    ended(chat)
    before = chat.transcript.messages[1]["content"]
    assert "limit of new tokens" in chat.transcript.notes[1]
    chat.proceed(turn())
    assert chat.answer.live.startswith(f"[1,{json.dumps(chat.answer.pieces[0][0])}")
    ended(chat)
    prompt = chat.session.runner.prompts[-1]
    assert prompt[-1] == {"role": "assistant", "content": before}
    after = chat.transcript.messages[1]["content"]
    assert after == before + chat.answer.finished.text and len(after) > len(before)
    assert "".join(text for text, _ in chat.answer.pieces) == after and not chat.transcript.notes
    assert chat.transcript.version(1) == (1, 1)  # the longer one takes the place of the shorter


def test_undo_gives_the_turn_back(chat):
    chat.ask(turn("first"))
    ended(chat)
    chat.ask(turn("second"))
    ended(chat)
    assert chat.undo() == "second" and roles(chat) == ["user", "assistant"]
    assert chat.undo() == "first" and roles(chat) == [] and chat.transcript.answers == {}
    with pytest.raises(UsageError, match="nothing to undo"):
        chat.undo()


def test_an_edited_question_is_sent_and_the_old_branch_stays_reachable(chat):
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    chat.edit(0, turn("changed"))
    ended(chat)
    assert [m["content"] for m in chat.transcript.messages if m["role"] == "user"] == ["changed"]
    assert chat.session.runner.prompts[-1] == [{"role": "user", "content": "changed"}]
    assert chat.transcript.version(0) == (2, 2)
    chat.show_version(0, 1)
    said = [m["content"] for m in chat.transcript.messages if m["role"] == "user"]
    assert said == ["first", "second"] and len(chat.transcript.messages) == 4


def test_an_edited_answer_stays_as_edited_and_nothing_is_sent(chat):
    for text in ("first", "second"):
        chat.ask(turn(text))
        ended(chat)
    chat.edit(1, turn("my own words"))
    assert not chat.is_running and len(chat.session.runner.prompts) == 2
    assert (
        chat.transcript.messages[1]["content"] == "my own words"
        and len(chat.transcript.messages) == 4
    )
    assert set(chat.transcript.answers) == {3}


@pytest.mark.parametrize("act", ["regenerate", "proceed", "edit", "undo"])
def test_nothing_of_the_past_changes_while_an_answer_runs(chat, act):
    chat.ask(turn())
    arguments = {"edit": (0, turn("x")), "undo": ()}.get(act, (turn(),))
    with pytest.raises(UsageError, match="still running"):
        getattr(chat, act)(*arguments)
    assert roles(chat) == ["user"] and chat.pending == []
    chat.end()


def test_a_new_chat_keeps_the_old_one_and_the_answer_that_runs_there(controller):
    tab = owner()
    controller.send(tab, turn("first", system="be brief"))
    first = controller.session_of(tab)
    view = controller.new(tab, {"temperature": 1})
    second = controller.session_of(tab)
    assert second is not first and second.system == "" and second.settings == {"temperature": 1}
    assert view.history == [] and view.box == "" and view.system["value"] == ""
    assert json.loads(view.conversations)["rows"][0][::3] == [first.id, True]
    assert controller.new(tab, {}) and controller.session_of(tab) is second  # it is empty itself
    ended(first)
    assert roles(first) == ["user", "assistant"] and not first.transcript.notes
    assert [row[0] for row in json.loads(controller.refresh(tab).conversations)["rows"]] == [
        first.id
    ]
    view = controller.open_conversation(tab, event(id=first.id))
    assert len(view.history) == 2 and view.system["value"] == "be brief"
    assert json.loads(view.panel)["step"]["index"] == 29


def test_an_answer_goes_on_while_another_conversation_is_shown(controller, monkeypatch):
    monkeypatch.setattr(controller.session.runner, "steps", 10_000)
    tab = owner()
    controller.send(tab, turn("first", max_new_tokens=100_000))
    first = controller.session_of(tab)
    controller.new(tab, {})
    monkeypatch.setattr(session_module, "GRACE_SECONDS", 0.5)
    until = len(first._job.trace) + 200
    while first.is_running and len(first._job.trace) < until:
        controller.tick(tab)
    assert first.is_running
    first.stop()
    ended(first)


def _raise():
    raise UsageError("wanted failure")
    yield


def test_a_failure_before_any_text_gives_the_messages_back(controller):
    controller.session.runner.reply = lambda prompt, settings: iter(_raise())
    tab = owner()
    controller.send(tab, turn("keep me"))
    chat = controller.session_of(tab)
    ended(chat)
    assert chat.transcript.messages == ()
    view = controller.refresh(tab, "typed since")
    assert view.box == "keep me\n\ntyped since" and "wanted failure" in view.live
    assert controller.refresh(tab).box["__type__"] == "update"  # given back once


def test_a_failure_in_the_middle_keeps_the_text_and_gives_back_what_waits(chat):
    chat.session.runner.fail_at = 5
    chat.ask(turn("one"))
    chat.ask(turn("two"))
    chat.enter()
    ended(chat)
    assert chat.transcript.messages[1]["content"]
    assert chat.transcript.notes[1].startswith("stopped: the script says")
    assert "the script says" in chat.error and chat.pop_returned() == "two"


def test_sessions_leave_the_memory_by_age_and_by_number(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_SESSIONS", 3)
    sessions = SessionStore(controller.session, lambda answer: None)
    made = [sessions.open() for _ in range(3)]
    made[1].seen_at -= 10
    sessions.open()
    assert sessions.find(OWNER, made[1].id) is None
    assert sessions.find(OWNER, made[0].id) is made[0]
    made[0].seen_at -= session_module.IDLE_SECONDS + 1
    sessions.open()
    assert sessions.find(OWNER, made[0].id) is None


def test_a_guest_has_a_number_and_a_length_of_conversations(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OF_ONE_GUEST", 2)
    monkeypatch.setattr(store_module, "MAX_GUEST_CHARACTERS", 10)
    sessions = controller.sessions
    one, two, three = (sessions.open("a") for _ in range(3))
    assert sessions.all("a") == [two, three] and sessions.find("a", one.id) is None
    three.ask(turn("12345"))
    for act in (lambda: three.ask(turn("123456")), lambda: three.edit(0, turn("1" * 11))):
        with pytest.raises(UsageError, match="as long as|still running"):
            act()
    ended(three)


def test_steps_of_old_answers_are_let_go(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_STEPS_KEPT", 70)
    chat = controller.sessions.open()
    for _ in range(3):
        chat.ask(turn())
        ended(chat)
    assert [len(chat.transcript.answers[place].steps) for place in (1, 3, 5)] == [0, 30, 30]
    assert chat.transcript.answers[1].pieces  # the tint is still there


# ---- the controller ----


def test_a_bad_setting_is_one_line_and_queues_nothing(controller):
    tab = owner()
    view = post(controller.send, controller.refuse, tab, "hi", temperature=3)
    assert "temperature" in view.live and controller.session.runner.prompts == []
    assert controller.session_of(tab).transcript.messages == ()


def test_a_second_tab_is_told_and_draws_only_what_is_new(controller):
    one, two = owner(), owner()
    controller.attach(one, None)
    controller.attach(two, known(one))
    assert controller.tick(two)["__type__"] == "update"
    controller.send(one, turn("hi"))
    assert json.loads(controller.tick(two))["ask"] == "refresh"
    view = controller.refresh(two)
    assert len(view.history) == 1 and json.loads(view.next)["ask"] == "follow"
    asyncio.run(watch(controller, two))
    ended(controller.session_of(two))
    view = controller.refresh(two)
    assert len(view.history) == 2 and view.text == ""
    done = {"done": controller.session_of(two).transcript.messages[1]["content"]}
    assert json.loads(view.live) == done  # for a screen reader, once
    assert controller.attach(owner(), known(one)).live == ""
    again = controller.refresh(two)
    assert isinstance(again.history, dict) and isinstance(again.tint, dict)  # skipped


def test_a_new_chat_in_mid_answer_leaves_nothing_of_it_on_the_page(controller):
    tab = owner()
    controller.send(tab, turn("hi"))
    first = controller.session_of(tab)

    async def left():
        async for _ in controller.stream(tab):
            controller.new(tab, {})  # the browser asks for it while the stream is open

    asyncio.run(left())
    view = controller.refresh(tab)
    assert (view.live, view.text) == ("", "")
    again = controller.refresh(tab)
    assert isinstance(again.live, dict) and isinstance(again.text, dict)  # skipped
    ended(first)


def test_an_update_stays_small_however_long_the_conversation_is(controller):
    tab = owner()
    controller.send(tab, turn("hi"))
    chat = controller.session_of(tab)
    ended(chat)
    transcript = chat.transcript
    for _ in range(40):
        transcript = transcript.plus("user", "x" * 2000).plus("assistant", "y" * 2000)
    chat.transcript = transcript
    controller.send(tab, turn("more"))
    updates = asyncio.run(watch(controller, tab))
    assert max(len(update.live + update.text + update.panel) for update in updates) < 20_000


def test_a_row_maps_to_its_message_and_only_words_are_edited(controller):
    runner = controller.session.runner
    runner.pieces = ("<think>", "so", "</think>", "Yes", " it", " is")
    runner.steps = 2
    tab = owner()
    controller.send(tab, turn("hi"))
    chat = controller.session_of(tab)
    ended(chat)
    kinds = [row.kind for row in rows_of(chat.transcript)]
    assert kinds[:2] == ["text", "reasoning"]
    before = chat.transcript
    controller.edit(tab, turn("other thoughts", row=1))
    controller.edit(tab, turn("x", row=99))
    for forged in (event(index=[0, 1], value="x"), event()):
        post(controller.edit, controller.refuse_edit, tab, event=forged)
    assert chat.transcript is before
    view = controller.edit(tab, turn("No", row=2))
    assert chat.transcript.messages[1]["content"] == "No" and len(view.history) == 2
    controller.edit(tab, turn("hello", row=0))
    ended(chat)
    assert chat.transcript.messages[0]["content"] == "hello" and len(chat.transcript.messages) == 2


def test_a_click_on_an_earlier_answer_shows_its_steps(controller):
    tab = owner()
    for text in ("one", "two"):
        controller.send(tab, turn(text))
        ended(controller.session_of(tab))
    controller.refresh(tab)
    first = controller.session_of(tab).transcript.answers[1]
    panel = controller.choose(tab, event(index=1))
    assert json.loads(panel)["answer"] == first.number and controller.answer_of(tab) is first
    assert json.loads(controller.pick(tab, event(step=4)))["step"]["index"] == 4
    controller.send(tab, turn("three"))
    assert controller.answer_of(tab) is controller.session_of(tab).answer


def test_pieces_of_the_tint_are_sent_once_and_cover_the_words(controller):
    tab = owner()
    controller.send(tab, turn("one"))
    chat = controller.session_of(tab)
    ended(chat)
    first = json.loads(controller.refresh(tab).tint)
    (key,) = first["new"]
    assert first["rows"] == [[1, key]]
    assert "".join(first["new"][key][1::2]) == chat.transcript.messages[1]["content"]
    controller.send(tab, turn("two"))
    ended(chat)
    second = json.loads(controller.refresh(tab).tint)
    assert len(second["rows"]) == 2 and key not in second["new"] and len(second["new"]) == 1


def test_the_plain_rate_is_of_the_answer_and_of_the_last_one_while_it_comes(
    controller, monkeypatch
):
    tab = owner()
    controller.send(tab, turn("hi"))
    ended(controller.session_of(tab))
    answer = controller.answer_of(tab)
    assert answer.plain_rate and controller.plain_of(answer) == answer.plain_rate
    comes = Answer(prefilled=answer.prefilled)
    assert controller.plain_of(comes) == answer.plain_rate
    now = time.monotonic()
    monkeypatch.setattr(viewer.time, "monotonic", lambda: now + viewer.NEAR_SECONDS + 1)
    assert controller.plain_of(comes) is None  # that machine may have other work by now
    assert controller.plain_of(answer) == answer.plain_rate


def test_a_plain_answer_and_one_without_a_timing_have_no_ratio(controller):
    tab = owner()
    controller.send(tab, turn("hi", vanilla=True))
    ended(controller.session_of(tab))
    plain = controller.answer_of(tab)
    assert plain.is_plain and controller.plain_of(plain) is None
    assert figures(plain, controller.plain_of(plain))["ratio"] is None


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
    assert [text[s.start : s.end] for s in found if not s.is_reasoning] == words
    assert [text[s.start : s.end] for s in found if s.is_reasoning and s.end > s.start] == thoughts
    assert visible_text(text) == "".join(words)


def test_half_a_tag_is_not_shown_while_it_comes():
    assert [visible_text("ab<think>"[:n]) for n in range(1, 10)] == ["a", "ab"] + ["ab"] * 7
    assert visible_text("a < b") == "a < b"


def test_pieces_are_cut_at_the_span():
    text = "<think>ab</think>cde"
    pieces = [("<thi", 2), ("nk>ab</th", 3), ("ink>c", 1), ("de", 4)]
    thought, words = spans(text)
    assert list(pieces_within(pieces, thought)) == [("ab", 3)]
    assert list(pieces_within(pieces, words)) == [("c", 1), ("de", 4)]


def test_a_note_is_text_whatever_is_in_it():
    drawn = [
        chatbot_row(row, "user")
        for row in rows(({"role": "user", "content": "x"},), {0: "<b>*"}, {})
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


def test_the_steps_of_an_answer_are_its_pieces(controller):
    chat = controller.sessions.open()
    chat.ask(turn())
    ended(chat)
    steps = [event for event in chat.answer.steps if isinstance(event, Step)]
    assert chat.answer.pieces[1:] == [(step.text, len(step.token_ids)) for step in steps]


@pytest.mark.parametrize("is_owner", [True, False])
def test_only_the_owners_answers_are_learnt_from(controller, is_owner):
    learnt = []
    controller.sessions.learn = learnt.append
    tab, visitor = Tab(), SimpleNamespace(headers={}, username=None) if is_owner else guest()
    controller.attach(tab, None, visitor)
    chat = controller.session_of(tab)
    chat.ask(turn("hello"))
    ended(chat)
    assert learnt == ([chat.answer] if is_owner else [])
