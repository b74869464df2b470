"""What the tabs of a browser see of a chat: an answer as it comes, and only what is new."""

import asyncio
import json
from types import SimpleNamespace

from support.conversations import ended, event, known, owner, post, roles, turn, watch
from support.waiting import wait_for

from medusa_chat.errors import UsageError
from medusa_chat.ui.chat import answer_run
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.view import rows_of


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
    monkeypatch.setattr(answer_run, "HIDDEN_SECONDS", 600)
    tab = owner()
    controller.send(tab, turn("hi"))
    chat = controller.session_of(tab)
    asyncio.run(watch(controller, tab, lambda: len(chat.answer.steps) >= 2))
    had = len(chat._run.job.trace)
    wait_for(lambda: len(chat._run.job.trace) > had)
    monkeypatch.setattr(answer_run, "HIDDEN_SECONDS", 0)
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
    monkeypatch.setattr(answer_run, "HIDDEN_SECONDS", 0.1)
    tab = owner()
    controller.send(tab, turn("hi"))
    asyncio.run(watch(controller, tab))
    assert len(controller.session_of(tab).answer.steps) == 30


def test_a_new_chat_is_never_another_tabs(controller):
    one, two = owner(), owner()
    controller.new(one, {})
    controller.attach(two, known(one))
    empty = controller.session_of(one)
    assert controller.session_of(two) is empty
    controller.new(two, {})
    assert controller.session_of(two) is not empty and controller.session_of(one) is empty


def test_a_new_chat_keeps_the_old_one_and_the_answer_that_runs_there(controller):
    tab = owner()
    controller.send(tab, turn("first", system="be brief"))
    first = controller.session_of(tab)
    view = controller.new(tab, {"temperature": 1})
    second = controller.session_of(tab)
    assert second is not first and second.system == "" and second.settings == {"temperature": 1}
    assert view.history == [] and view.system["value"] == ""
    assert json.loads(view.conversations)["rows"][0][:4:3] == [first.id, True]
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
    monkeypatch.setattr(controller.session.runner, "steps", 100_000)
    clock = SimpleNamespace(monotonic=lambda: clock.now, now=1000.0)
    monkeypatch.setattr(answer_run, "time", clock)
    tab = owner()
    controller.send(tab, turn("first", max_new_tokens=100_000))
    first = controller.session_of(tab)
    controller.new(tab, {})
    for _ in range(3):
        clock.now += answer_run.HIDDEN_SECONDS - 1
        controller.tick(tab)
        seen = len(first._run.job.trace) + 20
        wait_for(lambda seen=seen: len(first._run.job.trace) > seen or not first.is_running)
    assert first.is_running
    clock.now += answer_run.HIDDEN_SECONDS + 1
    ended(first)


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


def test_only_what_a_stream_wrote_is_cleared(controller):
    """The view of a send may reach the browser behind its stream's first words."""
    tab = owner()
    controller.attach(tab, None)
    for _ in range(2):
        view = controller.send(tab, turn("hi"))
        assert isinstance(view.history, list) and isinstance(view.text, dict)  # drawn, skipped
        asyncio.run(watch(controller, tab))
        ended(controller.session_of(tab))
        assert controller.refresh(tab).text == ""


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
    controller.edit(tab, turn("other words", row=1))
    controller.edit(tab, turn("x", row=99))
    for forged in (event(index=[0, 1], value="x"), event()):
        post(controller.edit, controller.refuse_edit, tab, event=forged)
    assert chat.transcript is before
    view = controller.edit(tab, turn("No", row=2))
    edited = chat.transcript.messages[1]
    assert edited["content"] == "No" and edited["reasoning"] == "so"  # the thought stays
    assert len(view.history) == len(rows_of(before))
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
    controller.redraw(tab)  # a view was lost
    assert controller.answer_of(tab) is first
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


def test_a_tab_that_got_its_views_in_another_order_draws_the_last_one_anew(controller):
    """Its Stop stood for ever, or the answer was not there: the server took it for drawn."""
    tab = owner()
    controller.attach(tab, None)
    early = controller.send(tab, turn("hi"))
    ended(controller.session_of(tab))
    late = controller.refresh(tab)
    assert len(late.history) == 2 and late.stop["visible"] is False
    for line in (late.next, late.next, early.next):  # it may be on its way at the first look
        assert controller.tick(tab, line)["__type__"] == "update"
    assert json.loads(controller.tick(tab, early.next))["ask"] == "refresh"
    again = controller.refresh(tab)
    assert len(again.history) == 2 and again.stop["visible"] is False and again.text == ""
    for forged in (5, None, "x", "[]", '{"view": "1"}', '{"view": -1}', again.next, again.next):
        assert controller.tick(tab, forged)["__type__"] == "update"


def test_the_end_of_an_answer_is_told_once_though_all_is_drawn_anew(controller):
    """A screen reader heard nothing of an answer that was over by then."""
    tab = owner()
    controller.attach(tab, None)
    controller.send(tab, turn("hi"))
    ended(controller.session_of(tab))
    said = controller.session_of(tab).transcript.messages[1]["content"]
    assert json.loads(controller.redraw(tab).live) == {"done": said}
    assert controller.redraw(tab).live == ""


def test_a_look_that_shows_an_answer_tells_that_its_message_was_heard(controller, monkeypatch):
    """Else the box drops the next message as a second press for this one."""
    tab, ask, looks = owner(), ChatSession.ask, []
    controller.attach(tab, None)

    def held(chat, inputs):
        ask(chat, inputs)
        ended(chat)
        looks.append(json.loads(controller.refresh(tab).next)["heard"])

    monkeypatch.setattr(ChatSession, "ask", held)
    controller.send(tab, turn("hi"))
    assert looks == [1] and tab.heard == 1


def test_why_a_message_was_refused_stands_until_something_else_is_said(controller):
    """It went away where all was drawn anew, as on a slow link."""
    tab = owner()
    controller.attach(tab, None)
    line = controller.refuse_send(tab, UsageError("The message is empty.")).live
    assert "is empty" in line and controller.redraw(tab).live == line
    controller.send(tab, turn("hi"))
    ended(controller.session_of(tab))
    assert "is empty" not in controller.redraw(tab).live
    controller.refuse_send(tab, UsageError("The message is empty."))
    controller.new(tab, {})
    assert controller.redraw(tab).live == ""


def test_a_view_that_came_late_does_not_empty_the_answer_that_runs(controller):
    """The text that was streamed was gone until the next token came."""
    controller.session.runner.hold_at = 3
    tab = owner()
    controller.attach(tab, None)
    late = controller.send(tab, turn("hi"))
    controller.refresh(tab)

    async def behind():
        """What the looks of a tab that shows the late view bring, while it streams."""
        asked = []
        async for update in controller.stream(tab):
            if update.text:
                assert len(asked) < 2, "the stream goes on, and nothing new comes"
                asked.append(controller.tick(tab, late.next))
        return asked

    asked = asyncio.run(behind())
    assert asked[0]["__type__"] == "update" and json.loads(asked[1])["ask"] == "refresh"
    view = controller.refresh(tab)
    assert view.text == "" and json.loads(view.next)["ask"] == "follow"

    async def first():
        async for update in controller.stream(tab):
            if update.text:
                return update.text

    assert asyncio.run(first())
    controller.session.runner.hold_at = None
    ended(controller.session_of(tab))
