"""Conversations on disk: what was said is there again, and a broken file stops nobody."""

import json
import sqlite3
import threading
from contextlib import closing
from types import SimpleNamespace

import pytest
from support.conversations import TREES, ended, turn
from support.scripted import ScriptedRunner

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.history import FILE, History, StoredConversation
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import GUEST_HEADER
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.view import Tab

TALK = ({"role": "user", "content": "مرحبا 👋"}, {"role": "assistant", "content": "a\n\nb"})
KEPT = StoredConversation(TALK, {1: "stopped"}, "Be brief.")


@pytest.fixture
def told():
    return []


@pytest.fixture
def history(tmp_path, told):
    return History(tmp_path / "deep" / FILE, told.append)


def test_what_was_saved_is_loaded_for_its_browser_only(history, told):
    assert history.load("a") is None
    assert history.save("a", KEPT) and history.save("b", StoredConversation())
    again = History(history.file)
    assert (
        again.load("a") == KEPT
        and again.load("b") == StoredConversation()
        and again.load("c") is None
    )
    assert not told


def test_the_token_is_not_in_the_file(history):
    history.save("a-secret-token", KEPT)
    files = history.file.parent.iterdir()
    assert all(b"a-secret-token" not in file.read_bytes() for file in files)


@pytest.mark.parametrize("at", [0, 20, 100, 5000])
def test_a_broken_file_is_set_aside_and_said_once(history, told, at):
    history.save("a", KEPT)
    whole = history.file.read_bytes()
    history.file.write_bytes(whole[:at] + b"\xff" * 200 + whole[at + 200 :])
    history.load("a")
    assert history.save("b", KEPT) and history.load("b") == KEPT
    aside = list(history.file.parent.glob("*.corrupt-*"))
    assert len(aside) <= 1 and len(told) <= 1
    if at == 0:  # no database at all
        assert len(aside) == 1 and "set aside" in told[0]
        assert aside[0].read_bytes().startswith(b"\xff")


@pytest.mark.parametrize(
    "chat",
    [
        "{",
        "[]",
        "{}",
        json.dumps({"messages": [{"role": "system", "content": "x"}], "notes": {}, "system": ""}),
        json.dumps({"messages": [{"role": "user", "content": 7}], "notes": {}, "system": ""}),
        json.dumps({"messages": [], "notes": {"x": "y"}, "system": ""}),
        json.dumps({"messages": [], "notes": {}, "system": None}),
    ],
)
def test_a_broken_row_counts_as_none_and_is_said(history, told, chat):
    history.save("a", KEPT)
    with closing(sqlite3.connect(history.file)) as base, base:
        base.execute("UPDATE chats SET chat = ?", (chat,))
    assert history.load("a") is None
    assert len(told) == 1 and "cannot be read" in told[0]


def test_a_folder_that_cannot_be_made_is_said_and_stops_nothing(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    history = History(tmp_path / "file" / FILE, told.append)
    assert not history.save("a", KEPT) and not history.save("a", KEPT)
    assert len(told) == 1 and "not kept" in told[0]


def test_threads_may_save_at_once(history, told):
    threads = [threading.Thread(target=history.save, args=(str(n), KEPT)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(history.load(str(n)) == KEPT for n in range(8)) and not told


@pytest.fixture
def session():
    session = Session(ScriptedRunner(delay=0.001, prefill=0.001, steps=5))
    list(session.lifecycle.run(LoadRequest()))
    yield session
    session.close()


def test_a_new_server_finds_the_conversation_of_a_browser(session, history):
    controller, tab = ChatController(session, TREES, history), Tab()
    controller.attach(tab, None)
    chat = controller.session_of(tab)
    chat.ask(turn("hello"))
    ended(chat)
    chat.set_system("Be brief.")
    other, reloaded = ChatController(session, TREES, history), Tab()
    other.attach(reloaded, chat.token)
    found = other.session_of(reloaded)
    assert found is not chat
    assert (
        found.transcript.messages == chat.transcript.messages
        and len(found.transcript.messages) == 2
    )
    assert found.system == "Be brief."
    found.clear()
    third, last = ChatController(session, TREES, history), Tab()
    third.attach(last, chat.token)
    assert third.session_of(last).transcript.messages == ()


def test_what_a_guest_says_is_not_written(session, history):
    controller, tab = ChatController(session, TREES, history), Tab()
    controller.attach(tab, None, SimpleNamespace(headers={GUEST_HEADER: "1"}, username=None))
    chat = controller.session_of(tab)
    chat.ask(turn("hello"))
    ended(chat)
    assert len(chat.transcript.messages) == 2 and not history.file.exists()


def test_all_conversations_are_read_but_for_the_broken_ones(tmp_path):
    told = []
    history = History(tmp_path / FILE, told.append)
    assert history.all() == []
    for number in range(3):
        history.save(
            f"token {number}", StoredConversation(({"role": "user", "content": f"chat {number}"},))
        )
    with sqlite3.connect(history.file) as base:
        base.execute("INSERT INTO chats VALUES ('x', 0, '{')")
    base.close()
    texts = [kept.messages[0]["content"] for kept in history.all()]
    assert texts == ["chat 2", "chat 1", "chat 0"] and len(told) == 1
