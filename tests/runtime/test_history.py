"""Conversations on disk: what was said is there again, and a broken file stops nobody."""

import json
import sqlite3
import threading
from contextlib import closing

import pytest

from medusa_chat.runtime import old_history
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.message_tree import MessageTree
from medusa_chat.runtime.old_history import old_name
from medusa_chat.runtime.stored_conversation import MAX_TITLE, StoredConversation

TALK = ({"role": "user", "content": "مرحبا 👋"}, {"role": "assistant", "content": "a\n\nb"})
SETTINGS = {"temperature": 0.5}
KEPT = StoredConversation(MessageTree.of(TALK, {1: "stopped"}), "Be brief.", SETTINGS, "", 1.5, 2.5)
# The store as it was: one row per browser, found by the hash of its token.
OLD_TABLE = """CREATE TABLE chats (
    browser TEXT PRIMARY KEY, saved_at REAL NOT NULL, chat TEXT NOT NULL
) WITHOUT ROWID"""
OLD = json.dumps({"messages": TALK, "notes": {"1": "stopped"}, "system": "Be brief."})


@pytest.fixture
def told():
    return []


@pytest.fixture
def history(tmp_path, told):
    return History(tmp_path / "deep" / FILE, told.append)


def said(*texts, at=0.0, title=""):
    tree = MessageTree.of({"role": "user", "content": text} for text in texts)
    return StoredConversation(tree, given_title=title, updated_at=at)


def test_what_was_saved_is_loaded_again(history, told):
    assert history.load("a") is None and history.all() == [] and history.listed() == []
    assert history.save("a", KEPT) and history.save("b", said("hi"))
    again = History(history.file)
    assert again.load("a") == KEPT and again.load("b") == said("hi") and again.load("c") is None
    assert KEPT.messages == TALK and KEPT.title == "مرحبا 👋" and not told


def test_every_version_of_a_message_and_its_pieces_come_back(history):
    tree = MessageTree().plus("user", "q").plus("assistant", "one", lengths=(1, 3))
    tree = tree.head(1).plus("assistant", "two")
    history.save("a", StoredConversation(tree))
    found = history.load("a").tree
    assert found == tree and found.versions(3) == (2, 3) and found.said[2].lengths == (1, 3)


def test_the_list_is_newest_first_and_searched_by_title_and_words(history):
    for number, text in enumerate(("ÄPFEL and pears", "plums", "figs")):
        history.save(f"id{number}", said(text, "more", at=number, title="Äther" * (number == 2)))
    assert [(one.id, one.title) for one in history.listed()] == [
        *[("id2", "Äther"), ("id1", "plums"), ("id0", "ÄPFEL and pears")]
    ]
    assert [one.id for one in history.listed("äpfel")] == ["id0"]
    assert [one.id for one in history.listed("äT")] == ["id2"]
    assert history.listed("content") == [] and len(history.listed("", 2)) == 2


def test_a_deleted_one_is_in_no_list_and_comes_back_until_it_is_removed(history):
    history.save("a", said("secret words"))
    history.save("a", said("secret words"), is_deleted=True)
    assert history.load("a") is None and history.listed() == [] == history.all()
    history.save("a", said("secret words"))
    assert len(history.listed()) == 1 and history.purge() == []
    history.save("a", said("secret words"), is_deleted=True)
    history.save("b", said("other"), is_deleted=True)
    assert history.purge("b") == ["b"] and history.purge() == ["a"] and history.purge() == []
    history.save("a", said("later"), is_deleted=True)
    data = b"".join(file.read_bytes() for file in history.file.parent.iterdir())
    assert b"secret words" not in data


@pytest.mark.parametrize(
    ("text", "title"),
    [("\n  two \t words\nnext", "two words"), ("x" * 99, "x" * (MAX_TITLE - 1) + "…"), (" ", "")],
)
def test_a_title_is_the_first_line_of_the_first_message(text, title):
    assert said(text, "next").title == title and said().title == ""
    assert said(text, title="mine").title == "mine"


@pytest.mark.parametrize("at", [0, 20, 100, 4096, 5000])
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


ROW = json.loads(KEPT.to_line())


@pytest.mark.parametrize(
    "chat",
    [
        *("{", "[]", "{}", "[" * 100_000),
        *(json.dumps({**ROW, name: None}) for name in ("messages", "leaf", "made", "system")),
        json.dumps({**ROW, "settings": []}),
        json.dumps({**ROW, "leaf": 7}),
        json.dumps({**ROW, "made": 1}),
        *(
            json.dumps({**ROW, "messages": [{**ROW["messages"][0], **wrong}, ROW["messages"][1]]})
            for wrong in ({"role": "system"}, {"content": 7}, {"parent": 1}, {"id": True})
        ),
    ],
)
def test_a_broken_row_counts_as_none_and_is_said(history, told, chat):
    history.save("a", KEPT)
    with closing(sqlite3.connect(history.file)) as base, base:
        base.execute("UPDATE conversations SET body = ?", (chat,))
    assert history.load("a") is None and history.all() == []
    assert len(told) == 1 and "cannot be read" in told[0]


def test_a_folder_that_cannot_be_made_is_said_and_stops_nothing(tmp_path, told):
    (tmp_path / "file").write_text("in the way")
    history = History(tmp_path / "file" / FILE, told.append)
    assert not history.save("a", KEPT) and not history.save("a", KEPT)
    assert len(told) == 1 and "cannot be saved" in told[0]


def test_threads_may_save_at_once(history, told):
    threads = [threading.Thread(target=history.save, args=(str(n), KEPT)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(history.load(str(n)) == KEPT for n in range(8)) and not told


def test_all_conversations_are_read_but_for_the_broken_ones(tmp_path):
    told = []
    history = History(tmp_path / FILE, told.append)
    for number in range(3):
        history.save(f"id{number}", said(f"chat {number}", at=number))
    with closing(sqlite3.connect(history.file)) as base, base:
        base.execute("INSERT INTO conversations VALUES ('x', '', 0, 9, NULL, '', '{')")
    texts = [kept.messages[0]["content"] for kept in history.all()]
    assert texts == ["chat 2", "chat 1", "chat 0"] and len(told) == 1


# ---- the store as it was ----


@pytest.fixture
def old_file(tmp_path):
    file = tmp_path / FILE
    with closing(sqlite3.connect(file)) as base, base:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute(OLD_TABLE)
        rows = [(old_name("my token"), 7.5, OLD)]
        empty = json.dumps({"messages": [], "notes": {}, "system": ""})
        rows.append((old_name("empty"), 8.0, empty))
        base.executemany("INSERT INTO chats VALUES (?, ?, ?)", [*rows, ("broken", 9.0, "{")])
    return file


def test_an_old_store_is_taken_over_once_row_by_row(old_file, told):
    history = History(old_file, told.append)
    kept = history.load(old_name("my token"))
    assert (kept.tree, kept.system) == (KEPT.tree, "Be brief.") and kept.updated_at == 7.5
    assert len(history.listed()) == 1 and len(told) == 1  # the broken row, which stays
    with closing(sqlite3.connect(old_file)) as base, base:
        assert base.execute("SELECT browser FROM chats").fetchall() == [("broken",)]
        base.execute("INSERT INTO chats VALUES ('late', 9.0, ?)", (OLD,))
    assert len(history.listed()) == 1


def test_an_old_store_is_untouched_where_it_cannot_be_taken_over(old_file, told, monkeypatch):
    monkeypatch.setattr(old_history, "INSERT", "INSERT INTO nowhere VALUES (?, ?, ?, ?, ?, ?)")
    assert History(old_file, told.append).all() == [] and told
    monkeypatch.undo()
    with closing(sqlite3.connect(old_file)) as base:
        assert base.execute("SELECT count(*) FROM chats").fetchone() == (3,)
        assert base.execute("SELECT count(*) FROM conversations").fetchone() == (0,)
        assert base.execute("PRAGMA user_version").fetchone() == (0,)
    assert len(History(old_file, told.append).all()) == 1
