"""Whose a conversation is: a guest never reaches another's, and has bounds of its own."""

import json
from dataclasses import replace

import pytest
from support.conversations import ended, event, guest, known, owner, turn

from medusa_chat.errors import UsageError
from medusa_chat.ui.chat import session_store as store_module
from medusa_chat.ui.chat.answer import Row
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.session_store import MAX_GUEST_SESSIONS, MAX_OF_ONE_GUEST, OWNER
from medusa_chat.ui.chat.view import rows_of
from medusa_chat.ui.page.status import FOR_GUESTS


def test_other_guests_never_see_a_conversation(controller):
    mine, owners = Tab(), owner()
    controller.attach(mine, None, guest())
    controller.send(mine, turn("my secret"))
    assert mine.scope not in ("", OWNER)
    names = ("link", "tab", "last", "guest")
    forged = [None, "", 7, "[]", "{", json.dumps({"guest": mine.scope})]
    forged += [json.dumps(dict.fromkeys(names, mine.conversation))]
    forged += [json.dumps({"tab": mine.conversation, "guest": OWNER})]
    for name, posted in enumerate(forged):
        stranger = Tab()
        view = controller.attach(stranger, posted, guest(OWNER if name == 0 else f"2{name}"))
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


def test_a_guest_reads_no_folder_of_a_load_that_failed(controller, monkeypatch):
    tabs = Tab(), owner()
    for tab, request in zip(tabs, (guest(), None), strict=True):
        controller.attach(tab, None, request)
        controller.session_of(tab).error = "the model in /far/folder/x cannot be read"
    lifecycle = controller.session.lifecycle
    monkeypatch.setattr(lifecycle, "state", replace(lifecycle.state, model=None))
    theirs, mine = (
        controller.attach(Tab(), known(tab), request).live
        for tab, request in zip(tabs, (guest(), None), strict=True)
    )
    assert FOR_GUESTS in theirs and "/far/folder" in mine


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
    assert controller.session_of(later).is_empty


def test_a_guest_who_comes_in_many_tabs_costs_no_other_guest_a_conversation(controller):
    """215 loads with fresh session hashes erased what all guests had said."""
    mine, others = Tab(), []
    controller.attach(mine, None, guest("me"))
    controller.send(mine, turn("hello"))
    ended(controller.session_of(mine))
    for _ in range(MAX_GUEST_SESSIONS + 15):
        others.append(Tab())
        controller.attach(others[-1], None, guest("one of many tabs"))
    assert len(controller.sessions.all(others[0].scope)) == MAX_OF_ONE_GUEST
    for number in range(MAX_GUEST_SESSIONS + 15):
        controller.attach(Tab(), None, guest(f"one of many {number}"))
    assert len(controller.sessions.all()) <= MAX_GUEST_SESSIONS
    assert len(controller.session_of(mine).transcript.messages) == 2


def test_a_guests_empty_conversations_go_before_what_they_said(controller):
    said = controller.sessions.open("a")
    said.ask(turn("hello"))
    ended(said)
    for _ in range(MAX_OF_ONE_GUEST + 5):
        controller.sessions.open("a")
    assert controller.sessions.find("a", said.id) is said
    assert len(controller.sessions.all("a")) == MAX_OF_ONE_GUEST


def test_nothing_is_kept_of_guests_who_are_gone(controller):
    """One may log in again and again, each time as another."""
    store = controller.sessions
    for number in range(3):
        tab = Tab()
        controller.attach(tab, None, guest(str(number)))
        controller.send(tab, turn("hi"))
        ended(controller.session_of(tab))
        store.end_guests()
    store.open()
    assert set(store._versions) <= {OWNER}


def test_a_guests_conversation_has_a_length_however_it_grows(controller, monkeypatch):
    """Prompts, stop strings, waiting messages and further versions were not counted."""
    monkeypatch.setattr(store_module, "MAX_GUEST_CHARACTERS", 20)
    chat = controller.sessions.open("a")
    chat.ask(turn("12345"))
    chat.ask(turn("1", system="1234", stop="1234"))  # it waits: 14 in all
    for posted in ({"text": "1234567"}, {"system": "1234567"}, {"stop": "1234567"}):
        with pytest.raises(UsageError, match="the limit for guests"):
            chat.ask(turn(**posted))
    chat.pending = []
    ended(chat)  # the answer is longer than what was left
    row = Row(0, "text", "12345")
    for act in (
        lambda: chat.ask(turn("1")),
        lambda: chat.regenerate(turn()),
        lambda: chat.proceed(turn()),
        lambda: chat.edit(row, turn("1")),
        lambda: chat.edit(rows_of(chat.transcript)[1], turn("1")),
        lambda: chat.set_system("1"),
    ):
        with pytest.raises(UsageError, match="the limit for guests"):
            act()


def test_what_cannot_be_sent_after_a_guests_answer_comes_back(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_GUEST_CHARACTERS", 20)
    chat = controller.sessions.open("a")
    for text in ("12345", "first", "second"):
        chat.ask(turn(text))
    ended(chat)  # with its answer the conversation is full
    assert chat.pop_returned() == "first\n\nsecond" and "the limit for guests" in chat.error
    assert chat.pending == [] and not chat.is_running


def test_a_guest_has_one_answer_at_a_time(controller):
    one, two, three = (controller.sessions.open(scope) for scope in ("a", "a", "b"))
    one.ask(turn("hello"))
    with pytest.raises(UsageError, match="your earlier answer"):
        two.ask(turn("hello"))
    assert two.is_empty and not two.is_running
    three.ask(turn("hello"))
    ended(one)
    two.ask(turn("hello"))
    ended(two)
