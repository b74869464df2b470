"""Whose a conversation is: a guest never reaches another's, and has bounds of its own."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.conversations import ended, event, guest, known, owner, turn

from medusa_chat.errors import UsageError
from medusa_chat.ui.chat import session_store as store_module
from medusa_chat.ui.chat.answer import Row
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.session_store import OWNER
from medusa_chat.ui.page.status import FOR_GUESTS


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
    assert controller.session_of(later).is_empty and later.scope != first.scope


def test_a_guest_has_a_number_and_a_length_of_conversations(controller, monkeypatch):
    monkeypatch.setattr(store_module, "MAX_OF_ONE_GUEST", 2)
    monkeypatch.setattr(store_module, "MAX_GUEST_CHARACTERS", 10)
    sessions = controller.sessions
    one, two, three = (sessions.open("a") for _ in range(3))
    assert sessions.all("a") == [two, three] and sessions.find("a", one.id) is None
    three.ask(turn("12345"))
    for act in (
        lambda: three.ask(turn("123456")),
        lambda: three.edit(Row(0, "text", "12345"), turn("1" * 11)),
    ):
        with pytest.raises(UsageError, match="as long as|still running"):
            act()
    ended(three)


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
