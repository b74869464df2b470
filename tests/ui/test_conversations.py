"""Conversations of the owner and of guests: what is listed, kept, evicted; what a restart finds."""

import asyncio
import json
import os
import sqlite3
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.conversations import TREES, ended, guest, known, owner, quick_session, roles, turn
from support.waiting import wait_for

from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.stored_conversation import MessageTree, StoredConversation
from medusa_chat.ui.chat import answer_run, session_store
from medusa_chat.ui.chat import conversation_list as list_module
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.session_store import MAX_GUEST_SESSIONS, MAX_SESSIONS, OWNER
from medusa_chat.ui.chat.step_panel import figures
from medusa_chat.ui.chat.view import UNANSWERED


@pytest.fixture
def session():
    with quick_session() as made:
        yield made


@pytest.fixture
def history(tmp_path):
    return History(tmp_path / FILE)


@pytest.fixture
def server(session, history):
    return ChatController(session, TREES, history)


def event(**data):
    return SimpleNamespace(_data=data)


def say(server, tab, text, **settings):
    server.send(tab, turn(text, **settings))
    chat = server.session_of(tab)
    ended(chat)
    return chat


def titles(server, scope=OWNER, search=""):
    return [entry.title for entry in server.list.entries(scope, search)[0]]


def test_a_new_server_lists_and_opens_what_was_said(server, session, history):
    tab = owner()
    chat = say(server, tab, "hello", system="Be brief.")
    chat.set_settings({"temperature": 0.3})
    say(server, tab, "and more")
    server.regenerate(tab, turn(seed="3"))
    ended(chat)
    other, fresh = ChatController(session, TREES, history), Tab()
    other.attach(fresh, None)
    assert other.session_of(fresh).is_empty and titles(other) == ["hello"]
    again = Tab()
    other.attach(again, known(tab))
    found = other.session_of(again)
    assert found is not chat and found.transcript.messages == chat.transcript.messages
    assert found.system == "" and found.settings == {"temperature": 0.3}
    assert found.transcript.version(3) == (2, 2)
    found.show_version(3, 1)
    assert found.transcript.messages[3]["content"]


def test_an_old_answer_is_stepped_through_after_a_restart(server, session, history):
    tab = owner()
    chat = say(server, tab, "hello")
    say(server, tab, "again")
    steps = [answer.steps for answer in chat.transcript.answers.values()]
    files = history.file.parent / "steps" / chat.id
    wait_for(lambda: len(list(files.glob("*.jsonl.gz"))) == 2)
    other, again = ChatController(session, TREES, history), Tab()
    view = other.attach(again, known(tab))
    assert json.loads(view.panel)["step"]["index"] == len(steps[1]) - 1
    assert len(json.loads(view.tint)["new"]) == 2  # which tokens came together is known at once
    panel = other.choose(again, event(index=1))
    found = other.answer_of(again)
    assert found.steps == steps[0] and json.loads(panel)["answer"] == found.number
    assert json.loads(other.pick(again, event(step=2)))["step"]["index"] == 2


def test_the_time_to_the_first_token_is_the_same_after_a_restart(server, session, history):
    tab = owner()
    say(server, tab, "hello")
    before = figures(server.answer_of(tab), None)["first_ms"]
    other, again = ChatController(session, TREES, history), Tab()
    other.attach(again, known(tab))
    after = figures(other.answer_of(again), None)
    assert before and after["first_ms"] == before


def test_steps_behind_an_edited_answer_are_there_after_a_restart(server, session, history):
    """What is said after an edit is said again by messages of new ids; the steps' files have the
    old ones."""
    tab = owner()
    chat = say(server, tab, "hello")
    say(server, tab, "again")
    steps = chat.transcript.answers[3].steps
    files = history.file.parent / "steps" / chat.id
    wait_for(lambda: len(list(files.glob("*.jsonl.gz"))) == 2)
    for text in ("Edited.", "And edited again."):
        server.edit(tab, turn(text, row=1))
    other, again = ChatController(session, TREES, history), Tab()
    other.attach(again, known(tab))
    text = json.loads(other.save_conversation(again, event(id=chat.id)))["text"]
    assert text.endswith(f"\n\n*{made_by(chat.transcript.answers[3])}*\n")
    other.choose(again, event(index=3))
    assert other.session_of(again).transcript.messages[1]["content"] == "And edited again."
    assert other.answer_of(again).steps == steps


def test_what_has_no_steps_any_more_keeps_its_text(server, session, history):
    tab = owner()
    chat = say(server, tab, "hello")
    files = history.file.parent / "steps"
    wait_for(lambda: list(files.glob("*/*.jsonl.gz")))
    server.sessions.steps.delete(chat.id)
    other, again = ChatController(session, TREES, history), Tab()
    view = other.attach(again, known(tab))
    assert len(view.history) == 2 and view.panel == ""
    assert other.choose(again, event(index=1))["__type__"] == "update"


@pytest.fixture
def pair(server, session, history):
    """Two programs on one data folder that show one conversation: (server, tab) of each, what the
    second one tells, and the conversation's id. The first has the conversations open."""
    one, two, told = owner(), Tab(), []
    chat = say(server, one, "hello")
    other = ChatController(session, TREES, History(history.file, told.append))
    other.attach(two, known(one))
    yield (server, one), (other, two), told, chat.id
    other.sessions.history.close()


def asked(history, id):
    """What the user said in a conversation on disk, all versions."""
    kept = history.load(id)
    return kept and [one.content for one in kept.tree.said.values() if one.role == "user"]


def test_a_second_program_shows_the_conversations_and_changes_none(pair, history, told):
    """Each had them in memory as they were when it looked, and the one that wrote last erased what
    was said in the other."""
    (first, one), (other, two), failures, id = pair
    assert f"another medusa-chat (process {os.getpid()}, since " in failures[0]
    assert "read-only here, and new chats are not saved" in failures[0] and len(failures) == 1
    assert "read-only here" in other.send(two, turn("theirs")).live and two.taken == 0
    for act in (other.regenerate, other.proceed):
        assert "read-only here" in act(two, turn()).live
    assert "read-only here" in other.undo(two).live
    assert "read-only here" in other.edit(two, turn("edited", row=0)).live
    other.set_system(two, "Be brief.")
    other.rename_conversation(two, event(id=id, title="theirs"))
    other.delete_conversation(two, event(id=id))
    assert len(told) == 3 and all("read-only here" in line for _, line, _ in told)
    with pytest.raises(UsageError, match="read-only here"):
        other.take_file(two.key, first.save_all(one.key).encode())
    other.keep_settings(two, {"temperature": 0.5})
    assert history.load(id).settings == {} and titles(other) == titles(first) == ["hello"]
    say(first, one, "and more")
    assert asked(history, id) == ["hello", "and more"]
    assert len(other.open_conversation(two, event(id=id)).history) == 4
    other.new(two, {})
    assert roles(say(other, two, "for a moment")) == ["user", "assistant"]
    assert titles(other) == ["for a moment", "hello"] and titles(first) == ["hello"]
    assert len(failures) == 1


def test_a_second_program_takes_the_conversations_when_the_first_has_ended(pair, history):
    (first, one), (other, two), told, id = pair
    visitor = owner()
    other.attach(visitor, None)
    say(other, visitor, "for a moment")
    say(first, one, "said before the end")
    history.close()
    view = other.undo(two)
    assert "check it" in view.live and len(view.history) == 4
    assert "was closed" in told[1] and other.sessions.failures(OWNER, 1) == told[1:]
    other.undo(two)
    assert two.back == "said before the end" and asked(history, id) == ["hello"]
    assert sorted(titles(other)) == ["for a moment", "hello"] and len(history.all()) == 2
    assert other.sessions.failures(OWNER, 0) == [] and len(told) == 2


def test_what_the_first_program_deleted_is_gone_in_the_second(pair, history):
    (first, one), (other, two), told, id = pair
    first.delete_conversation(one, event(id=id))
    other.attach(two, known(one))
    assert titles(other) == [] and two.conversation != id
    history.close()
    say(other, two, "new")
    assert titles(other) == ["new"] and not history.load(id)


def test_a_failed_save_is_not_lost_by_a_reload(server, history, monkeypatch):
    one = owner()
    chat = say(server, one, "hello")
    with monkeypatch.context() as patched:
        patched.setattr(history, "_open", _full)
        say(server, one, "unsaved")
    server.attach(one, known(one))
    server.attach(Tab(), known(one))
    say(server, one, "next")
    assert asked(history, chat.id) == ["hello", "unsaved", "next"]


def test_a_failure_that_is_over_is_not_told_to_a_new_tab(server, history, monkeypatch, told):
    one = owner()
    with monkeypatch.context() as patched:
        patched.setattr(history, "_open", _full)
        say(server, one, "hello")
        server.attach(Tab(), known(one))
    before = len(told)
    assert before >= 1
    say(server, one, "again")
    server.attach(Tab(), known(one))
    server.refresh(one)
    assert len(told) == before


def test_the_page_says_once_that_nothing_can_be_saved(server, history, monkeypatch, told):
    one, stranger = owner(), Tab()
    say(server, one, "hello")
    server.refresh(one)
    server.attach(stranger, None, guest())
    assert server.tick(one)["__type__"] == "update"
    monkeypatch.setattr(history, "_open", _full)
    say(server, one, "unsaved")
    assert json.loads(server.tick(one))["ask"] == "refresh"
    for tab in (one, one, stranger):
        server.refresh(tab)
    lines = [line for _, line, _ in told]
    assert len(lines) == 1 and "cannot be saved" in lines[0] and "disk is full" in lines[0]
    assert titles(server) == ["hello"]  # it can be read
    assert {seconds for _, _, seconds in told} == {None}


def _full():
    raise sqlite3.OperationalError("database or disk is full")


def test_an_answer_that_runs_is_on_disk_as_far_as_it_has_come(
    server, session, history, monkeypatch
):
    """A program that was ended took the whole answer along."""
    monkeypatch.setattr(answer_run, "KEEP_SECONDS", 0.05)
    session.runner.hold_at = 3
    tab = owner()
    server.send(tab, turn("hello"))
    chat = server.session_of(tab)
    wait_for(lambda: (kept := history.load(chat.id)) and len(kept.messages) == 2)
    version = chat.transcript_version
    other, again = ChatController(session, TREES, History(history.file)), Tab()
    other.attach(again, known(tab))
    found = other.session_of(again).transcript
    assert found.messages[1]["content"].startswith("Medusa adds")
    assert found.notes[1] == "interrupted: medusa-chat was ended" and len(titles(server)) == 1
    chat.rename("while it runs")
    assert len(chat.transcript.messages) == 1 and chat.transcript_version == version
    server.stop(tab)
    ended(chat)
    kept = history.load(chat.id)
    assert len(kept.tree.said) == 2 and kept.tree == chat.transcript.tree
    assert chat.transcript.notes[1] == "stopped" and kept.title == "while it runs"


def test_a_question_whose_answer_never_came_is_told_and_asked_again(server, session, history):
    """A program that was killed before the answer's first words were on disk left two questions in
    a row; where a chat template refuses that, the worker makes one of them."""
    tree = MessageTree().plus("user", "first").plus("assistant", "one").plus("user", "lost")
    for id in ("a", "b"):
        history.save(id, StoredConversation(tree))
    tab = owner()
    shown = server.attach(tab, json.dumps({"last": "a"}))
    assert json.loads(shown.live)["error"] == UNANSWERED and len(shown.history) == 3
    say(server, tab, "and another")
    asked = ["first", "one", "lost", "and another"]
    assert [one["content"] for one in session.runner.prompts[-1]] == asked
    roles = ["user", "assistant", "user", "user"]
    assert [one["role"] for one in session.runner.prompts[-1]] == roles
    assert UNANSWERED not in server.refresh(tab).live
    assert UNANSWERED in server.open_conversation(tab, event(id="b")).live
    assert UNANSWERED not in server.regenerate(tab, turn()).live
    ended(server.session_of(tab))
    assert [one["content"] for one in session.runner.prompts[-1]] == ["first", "one", "lost"]


@pytest.mark.parametrize("is_read", [False, True])
def test_what_was_asked_is_kept_when_the_program_is_ended(server, session, history, is_read):
    """Ctrl-C before an answer's first words took the question from the disk: it went back into the
    box of a page that was gone. Later on it left a note of a model's process that ended."""
    session.runner.prefill, session.runner.hold_at = 0.001 if is_read else 60, 3
    tab, others = owner(), set(threading.enumerate())
    server.send(tab, turn("hello"))
    wait_for(lambda: len(session.runner.last) == 3 if is_read else session.runner.prompts)
    mine = set(threading.enumerate()) - others
    session.close()
    for thread in mine:
        thread.join(60)
    kept = history.load(server.session_of(tab).id).tree.path
    assert [one.role for one in kept] == ["user", "assistant"][: 1 + is_read]
    assert [one.note for one in kept[1:]] == [answer_run.INTERRUPTED] * is_read


def test_what_waits_is_in_the_box_again_when_the_program_was_ended(server, session, history):
    """It was in the memory of the program alone."""
    session.runner.hold_at = 3
    tab = owner()
    for text in ("a question", "and then", "not this", "at last"):
        server.send(tab, turn(text))
    chat = server.session_of(tab)
    chat.drop(1, "not this")
    assert [one.text for one in chat.pending] == ["and then", "at last"]
    other, again = ChatController(session, TREES, History(history.file)), Tab()
    other.attach(again, known(tab))
    assert again.given == 0  # it waits in a program that goes on
    history.close()
    other.attach(again, known(tab))
    assert (again.given, again.back) == (1, "and then\n\nat last")
    other.sessions.history.close()
    third, late = ChatController(session, TREES, History(history.file)), Tab()
    third.attach(late, known(tab))
    third.refresh(late)
    assert late.given == 0 and history.load(chat.id).waiting == ""  # it is given once
    server.stop(tab)


def test_an_answer_that_is_shown_slowly_is_on_disk_when_it_is_complete(server, session, history):
    tab = owner()
    chat = server.session_of(tab)
    chat.enter()  # a tab shows it
    chat.ask(replace(turn("hello"), is_paced=True))
    wait_for(lambda: (kept := history.load(chat.id)) and len(kept.messages) == 2)
    assert chat.is_running and len(chat.transcript.messages) == 1
    server.stop(tab)
    ended(chat)
    assert len(history.load(chat.id).tree.said) == 2


def test_a_continued_answer_stays_in_memory_while_it_is_kept_so_far(
    server, session, history, monkeypatch
):
    """What it goes on from was taken out with the part that only the disk has."""
    monkeypatch.setattr(answer_run, "KEEP_SECONDS", 0.05)
    tab = owner()
    chat = say(server, tab, "hello")
    before = chat.transcript.tree
    session.runner.hold_at = 3
    server.proceed(tab, turn())
    wait_for(lambda: len(history.load(chat.id).tree.said) == 3)
    assert chat.transcript.tree.said == before.said
    server.stop(tab)
    ended(chat)
    assert history.load(chat.id).tree == chat.transcript.tree
    assert len(chat.transcript.messages) == 2 and chat.transcript.version(1) == (1, 1)


def test_a_save_that_waits_for_the_disk_holds_no_other_tab_up(
    server, session, history, monkeypatch
):
    """The stream of the answer waited for it in the event loop, and the whole page with it."""
    monkeypatch.setattr(answer_run, "KEEP_SECONDS", 0.05)
    session.runner.hold_at = 3
    tab, saving, goes_on, waits = owner(), threading.Event(), threading.Event(), []
    real = history.save

    def slow(*given):
        saving.set()
        if not waits:
            waits.append(goes_on.wait(30))
        return real(*given)

    async def look():
        with monkeypatch.context() as patched:
            stream = asyncio.create_task(drained(server.stream(tab)))
            patched.setattr(history, "save", slow)
            while not saving.is_set():
                await asyncio.sleep(0.01)
            for _ in range(10):
                await asyncio.sleep(0.02)  # the stream looks meanwhile
            goes_on.set()
            server.stop(tab)
            await stream

    server.send(tab, turn("hello"))
    asyncio.run(look())
    ended(server.session_of(tab))
    assert waits == [True]


async def drained(stream):
    async for _ in stream:
        pass


def test_an_empty_conversation_is_neither_stored_nor_listed(server, history):
    tab = owner()
    server.attach(tab, None)
    server.session_of(tab).set_system("Be brief.")
    server.new(tab, {"temperature": 1})
    assert titles(server) == [] and history.all() == []
    say(server, tab, "hello")
    assert titles(server) == ["hello"] and len(history.all()) == 1
    chat = server.session_of(tab)
    server.undo(tab)
    assert titles(server) == [] and history.all() == []
    assert "nothing to undo" in server.undo(tab).live and server.session_of(tab) is chat
    say(server, tab, "once more")
    assert titles(server) == ["once more"] and len(history.all()) == 1


@pytest.mark.parametrize("is_owner", [True, False])
def test_a_search_finds_all_words_anywhere_whatever_their_case_and_accents(server, is_owner):
    tab = Tab()
    server.attach(tab, None, None if is_owner else guest())
    say(server, tab, "Where is a good Café?\nNear the Straße, in Łódź or Seoul (서울)")
    server.new(tab, {})
    say(server, tab, "cafe elsewhere")
    found = {
        "cafe": ["cafe elsewhere", "Where is a good Café?"],
        "STRASSE  café": ["Where is a good Café?"],
        "서울 good": ["Where is a good Café?"],
        "strasse elsewhere": [],
    }
    for search, expected in found.items():
        assert titles(server, tab.scope, search) == expected
    excerpts = [one.excerpt for one in server.list.entries(tab.scope, "CAFE strasse")[0]]
    assert excerpts == [["Near the ", "Straße", ", in Łódź or Seoul (서울)"]]
    assert [one.excerpt for one in server.list.entries(tab.scope, "cafe")[0]] == [(), ()]


@pytest.mark.parametrize("is_owner", [True, False])
def test_rename_search_delete_and_undo(server, history, is_owner):
    tab = Tab()
    server.attach(tab, None, None if is_owner else guest())
    first = say(server, tab, "apples")
    server.new(tab, {})
    second = say(server, tab, "pears")
    assert titles(server, tab.scope) == ["pears", "apples"]
    view = server.rename_conversation(tab, event(id=first.id, title="  My\n fruit "))
    assert json.loads(view.conversations)["rows"][1][1] == "My fruit"
    view = server.search_conversations(tab, event(search="APPLES"))
    assert [row[0] for row in json.loads(view.conversations)["rows"]] == [first.id]
    server.search_conversations(tab, event(search=""))
    view = server.delete_conversation(tab, event(id=second.id))
    assert view.history == [] and server.session_of(tab).is_empty
    assert titles(server, tab.scope) == ["My fruit"]
    view = server.restore_conversation(tab, event(id=second.id))
    assert len(view.history) == 2 and server.session_of(tab) is second
    server.rename_conversation(tab, event(id=first.id, title=""))
    assert titles(server, tab.scope) == ["pears", "apples"]
    assert len(history.all()) == (2 if is_owner else 0)


def made_by(answer):
    per_step = answer.tokens / len(answer.steps)
    return f"scripted · {answer.rate:,.0f} tokens/s · {per_step:.1f} tokens a step"


def bylines(view):
    """What stands below the rows of a view: {row: words}."""
    return {row: " · ".join(made[:2]) for row, *made in json.loads(view.versions)["strips"]}


def test_below_each_answer_stands_who_gave_it_after_a_restart_too(server, session, history):
    tab = owner()
    chat = say(server, tab, "hello")
    say(server, tab, "again", vanilla=True)
    one, two = (chat.transcript.answers[at] for at in (1, 3))
    server.sessions.steps.delete(chat.id)  # the steps need not be there
    other, again = ChatController(session, TREES, history), Tab()
    found = bylines(other.attach(again, known(tab)))
    assert found == {1: made_by(one), 3: f"scripted · {two.rate:,.0f} tokens/s · plain"}
    server.edit(tab, turn("my own words", row=1))
    assert bylines(server.redraw(tab)) == {3: found[3]}, "the user's words are no model's"
    text = json.loads(server.save_conversation(tab, event(id=chat.id)))["text"]
    assert text.endswith(f"\n\n*{found[3]}*\n") and text.count("scripted") == 1


def test_a_conversation_is_saved_as_it_was_written(server):
    tab = owner()
    chat = say(server, tab, 'a/b: "c"\n<b>bold</b> *and* more')
    chat.set_system("Be brief.")
    line = json.loads(server.save_conversation(tab, event(id=chat.id)))
    assert line["name"] == "a b c.md"
    assert json.loads(server.save_conversation(tab, event(id=chat.id)))["at"] > line["at"]
    question, answer = (message["content"] for message in chat.transcript.messages)
    assert line["text"] == (
        '# a/b: "c"\n\n## System prompt\n\nBe brief.\n\n'
        f"## You\n\n{question}\n\n## medusa-chat\n\n{answer}\n\n*{made_by(chat.answer)}*\n"
    )
    assert "value" not in server.save_conversation(tab, event(id="of-nobody"))
    stranger = Tab()
    server.attach(stranger, None, guest())
    assert "value" not in server.save_conversation(stranger, event(id=chat.id))


def test_an_emptied_bin_leaves_nothing_on_the_disk(server, history):
    tab = owner()
    chat = say(server, tab, "secret words")
    steps = history.file.parent / "steps" / chat.id
    wait_for(steps.exists)
    view = server.delete_conversation(tab, event(id=chat.id))
    assert json.loads(view.conversations)["bin"] == 1
    server.show_bin(tab, event(shown=True))
    server.empty_bin(tab)
    assert not steps.exists() and server.list.binned(OWNER) == []
    assert server.restore_conversation(tab, event(id=chat.id)).history["__type__"] == "update"
    assert b"secret words" not in history.file.read_bytes()


def test_an_emptied_bin_keeps_what_was_brought_back_while_the_disk_was_full(
    server, history, monkeypatch
):
    tab, chats = owner(), []
    for text in ("pears", "plums"):
        chats.append(say(server, tab, text))
        server.delete_conversation(tab, event(id=chats[-1].id))
    steps = history.file.parent / "steps"
    wait_for(lambda: len(history.binned()) == len(list(steps.iterdir())) == 2)
    with monkeypatch.context() as patched:
        patched.setattr(history, "_open", _full)
        server.restore_conversation(tab, event(id=chats[0].id))
    server.empty_bin(tab)
    assert titles(server) == ["pears"] and server.list.binned(OWNER) == []
    assert [one.name for one in steps.iterdir()] == [chats[0].id]
    wait_for(lambda: history.load(chats[0].id) is not None)


def test_what_lies_in_the_bin_comes_back_after_a_restart(server, session, history):
    tab = owner()
    for text in ("pears", "plums"):
        chat = say(server, tab, text)
        server.delete_conversation(tab, event(id=chat.id))
    other, again = ChatController(session, TREES, history), owner()
    line = json.loads(other.show_bin(again, event(shown=True)).conversations)
    assert [row[1:] for row in line["binned"]] == [["plums", 30], ["pears", 30]]
    assert line["rows"] == [] and line["bin"] == 2
    other.restore_conversation(again, event(id=chat.id))
    assert titles(other) == ["plums"] and other.session_of(again).id == chat.id
    assert [one.title for one in other.list.binned(OWNER)] == ["pears"]
    assert json.loads(other.show_bin(again, event(shown=False)).conversations)["binned"] is None


def test_a_guests_bin_is_in_memory_and_their_own(server):
    guests = [Tab() for _ in range(2)]
    for number, tab in enumerate(guests):
        server.attach(tab, None, guest(str(number)))
    chat = say(server, guests[0], "mine")
    server.delete_conversation(guests[0], event(id=chat.id))
    assert [one.title for one in server.list.binned(guests[0].scope)] == ["mine"]
    assert server.list.binned(guests[1].scope) == server.list.binned(OWNER) == []
    server.empty_bin(guests[1])
    server.restore_conversation(guests[1], event(id=chat.id))
    assert titles(server, guests[0].scope) == [] == titles(server, guests[1].scope)
    server.restore_conversation(guests[0], event(id=chat.id))
    assert titles(server, guests[0].scope) == ["mine"]
    server.delete_conversation(guests[0], event(id=chat.id))
    server.empty_bin(guests[0])
    assert server.list.binned(guests[0].scope) == []


def test_pinned_conversations_are_listed_first_and_stay_so(server, session, history):
    tab = owner()
    first = say(server, tab, "first")
    for text in ("second", "third"):
        server.new(tab, {})
        say(server, tab, text)
    server.pin_conversation(tab, event(id=first.id, pinned=True))
    assert titles(server) == ["first", "third", "second"]
    assert titles(ChatController(session, TREES, history)) == ["first", "third", "second"]
    server.pin_conversation(tab, event(id=first.id, pinned="yes"))
    assert titles(server) == ["third", "second", "first"]


def test_a_temporary_chat_is_stored_nowhere_and_gone_with_its_tab(server, session, history):
    tab = owner()
    kept = say(server, tab, "kept words")
    server.new_temporary(tab, {})
    chat = say(server, tab, "secret words", system="secret prompt")
    server.rename_conversation(tab, event(id=chat.id, title="secret title"))
    line = json.loads(server.redraw(tab).conversations)
    assert line["temporary"] and titles(server) == ["kept words"]
    server.branch(tab, event(row=1))
    branch = server.session_of(tab)
    assert branch.is_temporary and server.sessions.find(OWNER, chat.id) is None
    other = owner()
    server.attach(other, json.dumps({"tab": branch.id}))
    server.open_conversation(tab, event(id=kept.id))
    assert server.session_of(other) is branch, "another tab shows it"
    server.new(other, {})
    assert server.sessions.find(OWNER, branch.id) is None
    assert not (history.file.parent / "steps" / chat.id).exists()
    data = b"".join(one.read_bytes() for one in history.file.parent.rglob("*") if one.is_file())
    assert b"kept words" in data and b"secret" not in data
    assert "secret" not in server.list.written(OWNER)


def test_an_empty_temporary_chat_becomes_a_stored_one_by_new_chat(server):
    tab = owner()
    server.new_temporary(tab, {})
    chat = server.session_of(tab)
    server.new(tab, {})
    assert server.session_of(tab) is chat and not chat.is_temporary
    say(server, tab, "hello")
    assert titles(server) == ["hello"] and chat.is_stored
    chat.set_temporary(True)
    assert not chat.is_temporary, "what is stored already is not made temporary"


def test_a_branch_is_a_conversation_of_its_own_up_to_a_message(server, session, history):
    tab = owner()
    chat = say(server, tab, "first", temperature=1.5)
    say(server, tab, "second")
    server.branch(tab, event(row=1))
    made = server.session_of(tab)
    assert made is not chat and made.transcript.messages == chat.transcript.messages[:2]
    assert made.answer.steps == chat.transcript.answers[1].steps != []
    (message,) = made.transcript.recorded
    wait_for(lambda: server.sessions.steps.load(made.id, message))
    assert titles(server) == ["first (branch)", "first"] and len(chat.transcript.messages) == 4
    say(server, tab, "another")
    other, again = ChatController(session, TREES, history), Tab()
    other.attach(again, known(tab))
    found = other.session_of(again)
    assert found.settings == chat.settings
    assert [one["content"] for one in found.transcript.messages[::2]] == ["first", "another"]
    for row in (None, -1, 4, "1"):
        server.branch(tab, event(row=row))
    long = replace(chat.stored, given_title="a" * 200).branch(1)
    assert long.title == "a" * 80 + " (branch)"  # a file of it is taken in
    assert server.session_of(tab) is made and len(titles(server)) == 2


def test_what_left_the_bin_leaves_the_disk_at_the_next_start(server, session, history, monkeypatch):
    tab = owner()
    chat = say(server, tab, "secret words")
    monkeypatch.setattr("medusa_chat.runtime.history.BIN_SECONDS", 0.05)
    server.delete_conversation(tab, event(id=chat.id))
    ChatController(session, TREES, history)
    assert b"secret words" in history.file.read_bytes(), "it left just now"
    monkeypatch.setattr(list_module, "LATE_SECONDS", 0.0)
    wait_for(lambda: not history.binned())
    ChatController(session, TREES, history)
    assert b"secret words" not in history.file.read_bytes()


def test_a_conversation_that_is_deleted_in_one_tab_is_gone_in_the_other(server):
    one, two = owner(), owner()
    chat = say(server, one, "hello")
    server.attach(two, known(one))
    server.delete_conversation(one, event(id=chat.id))
    assert json.loads(server.tick(two))["ask"] == "refresh"
    assert server.refresh(two).history == [] and two.conversation != chat.id


def test_two_tabs_show_two_conversations(server):
    one, two = owner(), owner()
    first = say(server, one, "first")
    server.refresh(one)
    server.attach(two, known(one))
    server.new(two, {})
    second = say(server, two, "second")
    server.refresh(two)
    assert server.session_of(one) is first and server.session_of(two) is second
    assert json.loads(server.tick(one))["ask"] == "refresh"  # its list has one more
    view = server.refresh(one)
    assert [row[1] for row in json.loads(view.conversations)["rows"]] == ["second", "first"]
    assert view.history["__type__"] == "update" and server.tick(one)["__type__"] == "update"


WRONG = (None, 7, True, [], {}, "../x", "a b", "x" * 101, "\ud800", "nobody", "")


@pytest.mark.parametrize("id", WRONG)
def test_a_forged_id_changes_nothing(server, id):
    tab = owner()
    chat = say(server, tab, "hello")
    for act in ("open", "delete", "restore", "rename", "pin"):
        getattr(server, f"{act}_conversation")(tab, event(id=id, title="x", pinned=True))
    assert server.session_of(tab) is chat and titles(server) == ["hello"]


@pytest.mark.parametrize("posted", [{"title": 7}, {"title": "x" * 201}, {"title": []}])
def test_a_forged_title_changes_nothing(server, posted):
    tab = owner()
    chat = say(server, tab, "hello")
    server.rename_conversation(tab, event(id=chat.id, **posted))
    assert titles(server) == ["hello"]


@pytest.mark.parametrize(
    "posted", [{}, {"row": 1}, {"row": 9, "version": 1}, {"row": 1, "version": 5}]
)
def test_a_forged_version_changes_nothing(server, posted):
    tab = owner()
    chat = say(server, tab, "hello")
    before = chat.transcript
    server.show_version(tab, event(**posted))
    server.show_version(tab, event(row="1", version=-1))
    assert chat.transcript is before


def test_201_browsers_of_the_owner_and_480_guests_erase_nothing(server, session, history):
    """The two hundred and first browser erased the oldest conversation, on disk too."""
    first = owner()
    chat = say(server, first, "the oldest")
    ended(chat)
    wait_for(lambda: len(history.load(chat.id).messages) == 2)
    kept = history.load(chat.id)
    for number in range(MAX_SESSIONS + 1):
        tab = Tab()
        server.attach(tab, None)
        shown = server.session_of(tab)
        shown.restore(kept)
        server.session_of(tab).set_system(f"of browser {number}")
    assert len(history.all()) == MAX_SESSIONS + 2
    for number in range(480):
        tab = Tab()
        server.attach(tab, json.dumps({"last": chat.id}), guest(f"{number}"))
        assert server.session_of(tab).is_empty
        shown = server.session_of(tab)
        shown.restore(kept)
        server.session_of(tab).rename(f"guest {number}")
    owners, guests = server.sessions.all(OWNER), len(server.sessions.all())
    assert len(owners) <= MAX_SESSIONS and guests - len(owners) <= MAX_GUEST_SESSIONS
    assert len(history.all()) == MAX_SESSIONS + 2 and history.load(chat.id) == kept
    assert server.session_of(first).transcript.messages == kept.messages
    assert len(ChatController(session, TREES, history).list.entries(OWNER, "", 999)[0]) == 202


def test_what_the_disk_did_not_take_stays_in_memory(server, history, monkeypatch):
    monkeypatch.setattr(history, "save", lambda *args: False)
    chat = say(server, owner(), "unsaved")
    for _ in range(MAX_SESSIONS + 5):
        server.sessions.open(OWNER)
    assert server.sessions.find(OWNER, chat.id) is chat and titles(server) == ["unsaved"]


def test_what_the_disk_did_not_take_is_saved_once_it_takes_something(server, history, monkeypatch):
    """With the next save in another conversation the page took its warning back, and what was said
    while the disk was full was lost with the program."""
    monkeypatch.setattr(session_store, "AGAIN_SECONDS", 0.02)
    with monkeypatch.context() as patched:
        patched.setattr(history, "_open", _full)
        chat = say(server, owner(), "unsaved")
        assert "disk is full" in server.sessions.failures(OWNER, 0)[0]
    wait_for(lambda: (kept := history.load(chat.id)) and kept.tree == chat.transcript.tree)
    wait_for(lambda: server.sessions.failures(OWNER, 0) == [])


def test_what_a_guest_says_is_not_written(server, history):
    tab = Tab()
    server.attach(tab, None, guest())
    chat = say(server, tab, "hello")
    assert len(chat.transcript.messages) == 2 and not history.file.exists()
    assert not (history.file.parent / "steps").exists()


def test_the_demo_says_that_a_system_prompt_has_no_effect(server, session):
    assert "no effect" not in server.attach(owner(), None).system["info"]
    tab = owner()
    server.attach(tab, None)
    model = session.state.model
    session.lifecycle.state = replace(session.state, model=replace(model, name="demo"))
    assert json.loads(server.tick(tab))["ask"] == "refresh"
    assert "No effect with the demo model" in server.refresh(tab).system["info"]
