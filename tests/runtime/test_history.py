"""Conversations on disk: what was said is there again, and a broken file stops nobody."""

import json
import math
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress
from dataclasses import replace

import pytest

from medusa_chat.runtime import history as module
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.stored_conversation import (
    MAX_TITLE,
    MessageTree,
    StoredConversation,
    marked,
)

TALK = ({"role": "user", "content": "مرحبا 👋"}, {"role": "assistant", "content": "a\n\nb"})
SETTINGS = {"temperature": 0.5}
TREE = MessageTree().plus(**TALK[0]).plus(**TALK[1], note="stopped")
KEPT = StoredConversation(TREE, "Be brief.", SETTINGS, "", 1.5, 2.5)
OLD = '{"system": "", "settings": {}, "title": "old", "leaf": 0, "made": 0, "messages": []}'
ROW_OF_BEFORE = ("b", "old", 1.0, 1.0, None, "old", OLD)


@pytest.fixture
def told():
    return []


@pytest.fixture
def history(tmp_path, told):
    return owned(tmp_path / "deep" / FILE, told.append)


def owned(file, tell=None):
    """The conversations of a file, which this program has."""
    history = History(file, tell)
    assert history.own()
    return history


def said(*texts, at=0.0, title=""):
    tree = MessageTree()
    for text in texts:
        tree = tree.plus("user", text)
    return StoredConversation(tree, given_title=title, updated_at=at)


def test_what_was_saved_is_loaded_again(history, told):
    assert history.load("a") is None and history.all() == [] and history.listed() == []
    other = said("hi")
    assert history.save("a", KEPT) and history.save("b", other)
    again = History(history.file)
    assert again.load("a") == KEPT and again.load("b") == other and again.load("c") is None
    assert KEPT.messages == TALK and KEPT.title == "مرحبا 👋" and not told


def test_every_version_of_a_message_and_its_pieces_come_back(history):
    tree = MessageTree().plus("user", "q").plus("assistant", "one", lengths=(1, 3))
    tree = tree.head(1).plus("assistant", "two")
    history.save("a", StoredConversation(tree))
    found = history.load("a").tree
    one, two = found.versions(found.leaf)
    assert found == tree and two == found.leaf and found.said[one].lengths == (1, 3)


def test_the_list_is_newest_first_and_searched_by_title_and_words(history):
    for number, text in enumerate(("ÄPFEL and pears", "plums", "figs")):
        history.save(f"id{number}", said(text, "more", at=number, title="Äther" * (number == 2)))
    assert [(one.id, one.title) for one in history.listed()] == [
        *[("id2", "Äther"), ("id1", "plums"), ("id0", "ÄPFEL and pears")]
    ]
    assert [one.id for one in history.listed("äpfel")] == ["id0"]
    assert [one.id for one in history.listed("äT")] == ["id2"]
    assert history.listed("content") == [] and len(history.listed("", 2)) == 2


def test_the_list_begins_with_what_was_said_last(history):
    for name, made, changed in (("old", 1.0, 9.0), ("new", 5.0, 6.0)):
        history.save(name, replace(KEPT, created_at=made, updated_at=changed))
    assert [one.id for one in history.listed()] == ["old", "new"]


def test_a_deleted_one_is_in_no_list_and_comes_back_until_it_is_removed(history, monkeypatch):
    now = time.time()
    monkeypatch.setattr("medusa_chat.runtime.history.time.time", lambda: now)
    monkeypatch.setattr("medusa_chat.runtime.history.BIN_SECONDS", 0)
    history.save("a", said("secret words"))
    history.save("a", said("secret words"), is_deleted=True)
    assert history.load("a") is None and history.listed() == [] == history.all()
    history.save("a", said("secret words"))
    assert len(history.listed()) == 1 and history.purge(0) == []
    history.save("a", said("secret words"), is_deleted=True)
    assert history.purge(60) == []
    now += 60
    history.save("b", said("other"), is_deleted=True)
    history.save("a", said("secret words"), is_deleted=True)  # that does not make it younger
    assert history.purge(30) == ["a"]
    now += 1
    assert history.purge(0) == ["b"] and history.purge(0) == []
    history.save("a", said("later"), is_deleted=True)
    data = b"".join(file.read_bytes() for file in history.file.parent.iterdir())
    assert b"secret words" not in data


def test_the_bin_keeps_a_conversation_for_thirty_days(history, monkeypatch):
    now = 1_000_000.0
    monkeypatch.setattr("medusa_chat.runtime.history.time.time", lambda: now)
    for id in ("a", "b"):
        history.save(id, said(f"words of {id}"), is_deleted=True)
        now += 1
    assert [one[:2] for one in history.binned()] == [("b", "words of b"), ("a", "words of a")]
    assert history.binned()[1].until == 1_000_000.0 + 30 * 86400
    assert history.purge(0) == [] and history.listed() == []
    assert history.restore("a") and not history.restore("a") and not history.restore("nobody")
    assert [one.id for one in history.listed()] == ["a"] and history.load("a") is not None
    now += 30 * 86400
    assert history.binned() == [] and not history.restore("b") and history.purge(0) == ["b"]
    history.save("a", said("words of a"), is_deleted=True)
    assert history.purge(-math.inf) == ["a"]
    data = b"".join(file.read_bytes() for file in history.file.parent.iterdir())
    assert b"words of" not in data


def test_what_the_disk_did_not_remove_is_not_said_to_be_gone(history, monkeypatch):
    history.save("a", said("words"), is_deleted=True)
    commit = history._commit

    def full(act):
        with suppress(ZeroDivisionError):
            commit(lambda base: (act(base), 1 / 0))
        raise sqlite3.OperationalError("disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(history, "_commit", full)
        assert history.purge(-math.inf) == []
    assert [one.id for one in history.binned()] == ["a"]
    assert history.purge(-math.inf) == ["a"] and history.binned() == []


def test_a_version_without_a_bin_neither_lists_nor_removes_what_lies_in_it(history):
    """Its two queries, as they were in 0.3.0, and how it writes."""
    history.save("a", said("keep me"), is_deleted=True)
    with closing(sqlite3.connect(history.file)) as base, base:
        query = "SELECT id FROM conversations WHERE deleted_at IS NULL"
        assert base.execute(query).fetchall() == []
        base.execute("DELETE FROM conversations WHERE deleted_at <= ?", (time.time() - 120,))
        base.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)", ROW_OF_BEFORE)
    assert history.restore("a") and history.load("a").title == "keep me"
    assert history.load("b").title == "old" and not history.load("b").is_pinned


def test_pinned_conversations_stand_first_also_of_a_search(history):
    for number in range(6):
        kept = replace(said(f"plums {number}", at=float(number)), is_pinned=number in (1, 3))
        history.save(str(number), kept)
    order = ["3", "1", "5", "4", "2", "0"]
    assert [one.id for one in history.listed()] == order == [o.id for o in history.listed("plums")]
    assert [one.is_pinned for one in history.listed(most=3)] == [True, True, False]
    assert history.load("3").is_pinned and not history.load("3").branch(1).is_pinned
    history.save("3", replace(history.load("3"), is_pinned=False))
    assert [one.id for one in history.listed()][:2] == ["1", "5"]


def test_a_list_makes_only_the_excerpts_that_it_shows(history, monkeypatch):
    made = []
    monkeypatch.setattr(module, "excerpt_of", lambda body, search: made.append(body) or "")
    for number in range(20):
        history.save(f"{number}", said("hello", f"words {number}", at=float(number)))
    assert [one.id for one in history.listed("words", 3)] == ["19", "18", "17"]
    assert len(made) == 3


def test_a_title_that_looks_like_a_pin_is_none(history):
    history.save("a", said('{"pinned": true, ', title='{"pinned": true, '))
    assert not history.listed()[0].is_pinned


@pytest.mark.parametrize(
    ("text", "search", "pieces"),
    [
        ("Rain clouds and CLOUDS", "cloud", ["Rain ", "cloud", "s and ", "CLOUD", "S"]),
        ("Élan naïve", "ELAN naive", ["", "Élan", " ", "naïve", ""]),
        ("a ﬁx", "fi", ["a ", "ﬁ", "x"]),
        ("ab", "abc ab a", ["", "ab", ""]),
        ("<b>", "<", ["", "<", "b>"]),
        ("none", "xyz", ["none"]),
        ("any", "  ", ["any"]),
        ("", "a", [""]),
    ],
)
def test_the_words_of_a_search_are_marked_in_a_text(text, search, pieces):
    assert marked(text, search) == pieces and "".join(pieces) == text


def test_an_excerpt_begins_and_ends_with_whole_words(history):
    words = " ".join(f"word{number}" for number in range(200))
    cut = said("title", words).excerpt("word77").strip("…").split()
    assert "word77" in cut and set(cut) <= set(words.split()) and len(cut) > 10


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
    assert len(aside) <= 1 and len(told) <= 1 + len(aside)
    if at == 0:  # no database at all
        assert len(aside) == 1 and "set aside" in told[0]
        assert aside[0].read_bytes().startswith(b"\xff")


def test_of_a_file_with_a_bad_page_all_but_what_lies_there_is_kept(history, told):
    texts = [f"{number} " * 3000 for number in range(10, 30)]  # each with pages of its own
    for text in texts:
        history.save(text[:2], said(text))
    history.save("99", said("deleted"), is_deleted=True)
    whole = history.file.read_bytes()
    page = whole.find(b"17 " * 1000) // 4096 * 4096
    history.file.write_bytes(whole[:page] + b"\xff" * 4096 + whole[page + 4096 :])
    left = [text[:2] for text in texts if not text.startswith("17")]
    assert [one.id for one in history.listed("0")] == ["20", "10"]
    assert sorted(one.id for one in history.listed()) == left and history.purge(-math.inf) == ["99"]
    assert history.save("17", said("again")) and history.load("16") is not None
    (line,) = told
    assert "set aside as chats.sqlite3.corrupt-" in line and "20 conversations could" in line
    (aside,) = history.file.parent.glob("*.corrupt-*")
    assert b"12 12 12" in aside.read_bytes() and not list(history.file.parent.glob("*.new-*"))


def test_only_the_program_that_has_the_conversations_writes(history, told):
    history.save("a", KEPT)
    other = History(history.file, told.append)
    assert not other.own() and not other.save("b", KEPT) and other.add([("b", KEPT)]) is None
    assert other.load("a") == KEPT and other.purge(0) == [] and told == []
    assert other.other_owner.startswith(f"another medusa-chat (process {os.getpid()}, since ")
    history.file.write_bytes(b"\xff" * 200 + history.file.read_bytes()[200:])
    assert other.listed() == [] and "cannot be read" in told[0], "a repair would be a write"
    history.close()
    assert not history.save("b", KEPT) and other.own() and other.own() and other.save("b", KEPT)
    assert {one.id for one in other.listed()} == {"a", "b"}


def test_a_program_that_was_killed_leaves_no_lock(tmp_path):
    code = """if True:
        import sys, time
        from pathlib import Path
        from medusa_chat.runtime.history import History
        history = History(Path(sys.argv[1]))
        print(history.own(), flush=True)
        time.sleep(600)
    """
    file = tmp_path / FILE
    owner = subprocess.Popen([sys.executable, "-c", code, file], stdout=subprocess.PIPE, text=True)
    assert owner.stdout.readline() == "True\n"
    history = History(file)
    assert not history.own() and f"process {owner.pid}," in history.other_owner
    owner.kill()
    owner.communicate()
    assert history.own() and history.save("a", KEPT)


@pytest.mark.parametrize("where", ["title 1", "words 1", "title 2"])
def test_a_damaged_byte_costs_a_character_and_no_list(history, told, where):
    for number in "12":
        history.save(number, said(f"words {number} " * 9, title=f"title {number}"))
    whole, bad = history.file.read_bytes(), b"\xff" + where.encode()[1:]
    history.file.write_bytes(whole.replace(where.encode(), bad))  # the file itself stays sound
    assert {one.id for one in history.listed()} == {"1", "2"}
    assert [one.id for one in history.listed("words 2")] == ["2"]
    assert history.load("1") and len(history.all()) == 2 and told == []


def schema_bytes():
    """Where the text of the schema stands in a file, in steps that come to every part of it."""
    schema = f"{module.TABLE}{module.INDEX}"
    return range(4096 - len(schema), 4096, 29)


@pytest.mark.parametrize("value", [b"\xff", b"A"])
def test_a_damaged_byte_of_the_schema_costs_nothing(tmp_path, value):
    """Most cost every conversation; some were an exception in every call, or a list that was empty
    for good."""
    owned(tmp_path / FILE).save("a", KEPT)
    whole = (tmp_path / FILE).read_bytes()
    for at in {*schema_bytes(), whole.index(b"created_at"), whole.index(b"body")}:
        told, file = [], tmp_path / str(at) / FILE
        file.parent.mkdir()
        file.write_bytes(whole[:at] + value + whole[at + 1 :])
        history = owned(file, told.append)
        assert [one.id for one in history.listed()] == ["a"], whole[at - 9 : at + 9]
        assert history.load("a") == KEPT and history.save("a", KEPT), whole[at - 9 : at + 9]
        assert len(told) == len(list(file.parent.glob("*.corrupt-*"))) <= 1
        assert not list(file.parent.glob("*.copy-*"))


@pytest.fixture
def nothing_beside(history):
    """Nothing can be written beside the file, as in a folder that cannot be written, or on a full
    disk: sqlite makes the index of its log there to read a file."""
    history.save("a", KEPT)
    history.file.with_name(f"{FILE}-shm").symlink_to(history.file.parent / "no" / "folder")
    return history


def test_reading_never_needs_writing(nothing_beside, told):
    history = nothing_beside
    assert [one.id for one in history.listed()] == ["a"] and history.all() == [KEPT]
    assert history.load("a") == KEPT
    assert told == []
    assert not history.save("b", KEPT) and "cannot be saved" in told[0]
    assert [one.id for one in history.listed()] == ["a"] and len(told) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_path_may_hold_what_an_address_may_not(tmp_path, told):
    history = owned(tmp_path / "a?b #c%20" / os.fsdecode(b"\xff") / FILE, told.append)
    history.save("a", KEPT)
    assert history.load("a") == KEPT and told == []


def test_what_cannot_be_read_without_writing_is_said(nothing_beside, told):
    history = nothing_beside
    history.file.with_name(f"{FILE}-wal").write_bytes(b"of a program that was killed")
    assert [one.id for one in history.listed()] == ["a"] == [one.id for one in history.listed()]
    assert len(told) == 1 and "the latest messages are missing" in told[0] and "-wal" in told[0]


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
            for wrong in (
                *({"role": "system"}, {"content": 7}, {"parent": 1}, {"id": True}),
                *({"figures": made} for made in (7, [7], ["demo", "fast"], ["demo", 1, 1, 1])),
            )
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
    history = owned(tmp_path / "file" / FILE, told.append)
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
    history = owned(tmp_path / FILE, told.append)
    for number in range(3):
        history.save(f"id{number}", said(f"chat {number}", at=number))
    with closing(sqlite3.connect(history.file)) as base, base:
        base.execute("INSERT INTO conversations VALUES ('x', '', 0, 9, NULL, '', '{')")
    texts = [kept.messages[0]["content"] for kept in history.all()]
    assert texts == ["chat 2", "chat 1", "chat 0"] and len(told) == 1


def test_a_failure_is_told_again_after_a_success(history, told, monkeypatch):
    opened = history._open

    def full():
        raise sqlite3.OperationalError("database or disk is full")

    for _ in range(2):
        monkeypatch.setattr(history, "_open", full)
        assert not history.save("a", KEPT) and not history.save("a", KEPT)
        monkeypatch.setattr(history, "_open", opened)
        assert history.save("a", KEPT)
    assert len(told) == 2 and "disk is full" in told[1] and history.told == told


def test_conversations_from_elsewhere_are_added_once_and_change_nothing_here(history, told):
    history.save("a", KEPT)
    shorter = replace(KEPT, tree=KEPT.tree.without(KEPT.tree.leaf))
    found = [("a", shorter), ("a", said("x")), ("b", said("y", at=3.0)), ("", said("z"))]
    assert history.add(found, {"b"}) == 3
    assert history.load("a") == KEPT and history.load("b") is None
    assert {one.title for one in history.listed()} == {KEPT.title, "x", "y", "z"}
    assert history.add(found, {"b"}) == 0 == history.add([]) and not told


def test_conversations_are_added_all_or_none(history, told):
    class Full(StoredConversation):
        def to_line(self):
            raise sqlite3.OperationalError("database or disk is full")

    history.save("a", KEPT)
    assert history.add([("b", said("x")), ("c", Full(TREE))]) is None and "is full" in told[0]
    assert [one.id for one in history.listed()] == ["a"]


def test_a_program_that_is_killed_while_it_adds_has_added_nothing(history):
    history.save("a", KEPT)
    code = """if True:
        import os, signal, sys
        from pathlib import Path
        from medusa_chat.runtime import history
        from medusa_chat.runtime.stored_conversation import MessageTree
        from medusa_chat.runtime.stored_conversation import StoredConversation

        class Deadly(StoredConversation):
            def to_line(self):
                os.kill(os.getpid(), signal.SIGKILL)

        long = StoredConversation(MessageTree().plus("user", "x" * 1_000_000))
        found = [(f"b{number}", long) for number in range(20)]  # more than sqlite's cache
        mine = history.History(Path(sys.argv[1]))
        assert mine.own()
        mine.add([*found, ("c", Deadly(long.tree))])
    """
    history.close()
    done = subprocess.run([sys.executable, "-c", code, str(history.file)])
    assert done.returncode == -signal.SIGKILL and history.own()
    assert [one.id for one in history.listed()] == ["a"]
    assert history.add([("b", said("x"))]) == 1
