"""All conversations as one file: read again as they were, and nothing of a bad one taken in."""

import json
import random
import threading
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.conversations import TREES, ended, event, guest, owner, quick_session, turn

from medusa_chat.errors import UsageError
from medusa_chat.runtime.answer_figures import AnswerFigures
from medusa_chat.runtime.history import FILE, History
from medusa_chat.runtime.stored_conversation import MessageTree, StoredConversation
from medusa_chat.ui.access import guard
from medusa_chat.ui.app import PageOptions, open_page
from medusa_chat.ui.chat import conversations_file
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.chat.conversations_file import FORMAT, MAX_MESSAGES, read, written
from medusa_chat.ui.page.live import TAB_HEADER

TREE = (
    MessageTree()
    .plus("user", "q")
    .plus("assistant", "one", "stopped", figures=AnswerFigures("demo"))
)
FORKED = (
    TREE.head(1)
    .plus("assistant", "two\n\tمرحبا", figures=AnswerFigures("heads on backbone"))
    .head(1)
)
SETTINGS = {"temperature": 0.5, "stop": "END", "tree": "chain", "vanilla": True}
KEPT = StoredConversation(FORKED, "Be brief.", SETTINGS, "A title", 1.5, 2.5)


@pytest.fixture(scope="module")
def session():
    with quick_session() as made:
        yield made


@pytest.fixture
def server(session, tmp_path):
    return ChatController(session, TREES, History(tmp_path / "data" / FILE))


def file_of(*conversations, **more):
    return json.dumps({"format": FORMAT, "version": 1, "conversations": conversations, **more})


def message(id=1, parent=0, role="user", content="hi", **more):
    return {"id": id, "parent": parent, "role": role, "content": content, **more}


def conversation(*messages, **more):
    return {"messages": messages or (message(),), **more}


def refused(text):
    with pytest.raises(UsageError) as caught:
        read(text if isinstance(text, bytes) else text.encode(), TREES)
    line = str(caught.value)
    assert len(line) < 300 and "\n" not in line and line.isprintable()
    return line


def said(server, *texts):
    tab = owner()
    for text in texts:
        server.send(tab, turn(text))
        ended(server.session_of(tab))
    return tab


def titles(server):
    return [entry.title for entry in server.list.entries("owner")[0]]


def models(said):
    """Of each message the model that gave it, empty where none did."""
    return [one.figures.model if one.figures else "" for one in said]


def test_a_file_is_read_as_it_was_written_branches_and_models_included():
    again = read(
        written([("a", KEPT), ("b", StoredConversation(TREE))]).encode(), TREES
    ).conversations
    assert again[0] == ("a", replace(KEPT, tree=replace(FORKED, made=max(FORKED.said))))
    assert again[1][1].title == "q" and again[1][1].given_title == ""
    assert models(again[0][1].tree.said.values()) == ["", "demo", "heads on backbone"]


def test_the_example_in_the_docs_can_be_read():
    text = (Path(__file__).parents[2] / "docs" / "conversations.md").read_text("utf-8")
    example = text[text.index('{"format"') :].partition("```")[0]
    [(id, found)] = read(example.encode(), TREES).conversations
    assert id == "aX3" and len(found.tree.said) == 3 and found.messages[1]["content"] == "Dear …"


def test_a_file_with_too_many_messages_is_refused(monkeypatch):
    monkeypatch.setattr(conversations_file, "MAX_OF_ALL", 2)
    assert "more than 2 messages" in refused(file_of(*[conversation()] * 3))


def test_what_is_said_here_is_taken_in_elsewhere_once(server, session, tmp_path):
    tab = said(server, "hello", "and more")
    server.regenerate(tab, turn())
    ended(server.session_of(tab))
    data = server.save_all(tab.key).encode()
    assert server.take_file(tab.key, data) == "0 conversations added, 1 here already"
    other = ChatController(session, TREES, History(tmp_path / "other" / FILE))
    visitor = said(other, "mine")
    version = other.sessions.version("owner")
    assert other.take_file(visitor.key, data) == "1 conversation added"
    assert other.sessions.version("owner") > version and set(titles(other)) == {"hello", "mine"}
    assert "already" in other.take_file(visitor.key, data)
    chat = server.session_of(tab)
    found = other.sessions.find("owner", chat.id)
    assert found.transcript.messages == chat.transcript.messages
    assert found.transcript.version(3) == (2, 2)
    assert models(found.transcript.tree.path)[-1] == "scripted"
    visitor.turn_to(found)
    other.send(visitor, turn("goes on"))
    ended(found)
    assert "already" in other.take_file(visitor.key, data) and len(titles(other)) == 2
    name = json.loads(other.save_conversation(visitor, event(id=chat.id)))["text"]
    assert "\n\n*scripted*\n" in name  # its steps are not here


def test_an_id_that_another_conversation_has_is_not_taken_from_it(server):
    tab = said(server, "hello")
    chat = server.session_of(tab)
    before = server.sessions.history.load(chat.id)
    forged = file_of(*(conversation(message(content=text), id=chat.id) for text in ("x", "y", "x")))
    assert server.take_file(tab.key, forged.encode()).startswith("2 conversations added, 1 here")
    assert server.sessions.history.load(chat.id) == before == chat.stored
    assert sorted(titles(server)) == ["hello", "x", "y"]
    assert ", 3 here" in server.take_file(tab.key, forged.encode())
    server.delete_conversation(tab, event(id=chat.id))
    data = file_of(conversation(message(content="z"), id=chat.id)).encode()
    assert server.take_file(tab.key, data) == "1 conversation added"
    server.restore_conversation(tab, event(id=chat.id))
    assert sorted(titles(server)) == ["hello", "x", "y", "z"]


def test_a_conversation_that_was_deleted_comes_back_from_the_file(server):
    tab = said(server, "hello")
    data, id = server.save_all(tab.key).encode(), server.session_of(tab).id
    server.delete_conversation(tab, event(id=id))
    assert titles(server) == []
    assert server.take_file(tab.key, data) == "1 conversation added"
    assert titles(server) == ["hello"]


def test_nothing_of_a_file_with_one_bad_conversation_is_taken_in(server):
    tab = said(server, "hello")
    bad = conversation(message(content=7))
    with pytest.raises(UsageError, match="^conversation 3: a message is a int"):
        server.take_file(tab.key, file_of(conversation(), conversation(), bad).encode())
    assert titles(server) == ["hello"]


@pytest.mark.parametrize(
    "values, why",
    [
        (b"PK\x03\x04", "ZIP"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("1" * 5000, "not valid JSON"),
        ("[]", "no conversations"),
        ('{"format": "x"}', "no conversations"),
        (file_of(version=2), "version is 2"),
        (file_of(version=[[]]), "version is a list"),
        (file_of(conversations={}), "not a list"),
        (file_of(7), "conversation 1: it has a int"),
        (file_of({}), "its messages are not a list"),
        (file_of({"messages": []}), "no messages"),
        (file_of(conversation(*[message()] * (MAX_MESSAGES + 1))), "at most 10,000"),
        (file_of(conversation(message(), message())), "two with one id"),
        (file_of(conversation(message(parent=1))), "tree"),
        (file_of(conversation(message(parent=9))), "tree"),
        (file_of(conversation(message(id=2, parent=3), message(id=3, parent=2))), "tree"),
        (file_of(conversation(message(id=True))), "whole number"),
        (file_of(conversation(message(id=2**53))), "whole number"),
        (file_of(conversation(message(id=1.0))), "whole number"),
        (file_of(conversation(message(role="system"))), "a role is 'system'"),
        (file_of(conversation(message(role=["user"]))), "a role is a list"),
        (file_of(conversation(message(content=None))), "give text"),
        (file_of(conversation(message(content="x" * 1_000_001))), "1,000,001 characters"),
        (file_of(conversation(message(model="x" * 1001))), "a model has 1,001"),
        (file_of(conversation(message(note={}))), "a note is a dict"),
        (file_of(conversation(shown=9)), "tree"),
        (file_of(conversation(shown="1")), "tree"),
        (file_of(conversation(id="../../x")), "its id is '../../x'"),
        (file_of(conversation(id="\x1b[2J")), "its id is"),
        (file_of(conversation(id=["x"])), "its id is a list"),
        (file_of(conversation(title=[])), "the title is a list"),
        (file_of(conversation(title="x" * 201)), "the title has 201"),
        (file_of(conversation(system=1)), "the system prompt is a int"),
        (file_of(conversation(settings=[])), "a list in the place of an object"),
        (file_of(conversation(created_at=float("nan"))), "created_at is nan"),
        (file_of(conversation(updated_at=-1)), "updated_at is -1"),
        (file_of(conversation(updated_at=True)), "updated_at is True"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(values, why):
    assert why in refused(values)


def test_what_this_program_wrote_it_reads_whatever_an_answer_ended_with():
    note = "stopped: " + "an error of many lines " * 100
    kept = StoredConversation(MessageTree().plus("user", "q").plus("assistant", "a", note))
    [(_, found)] = read(written([("a", kept)]).encode(), TREES).conversations
    assert found.tree == kept.tree


def test_half_a_character_in_a_setting_is_no_failure_of_the_disk(server):
    settings = {"stop": "END\ud83d\n\0"}
    data = file_of(conversation(settings=settings)).encode()
    tab = said(server, "hello")
    assert server.take_file(tab.key, data) == "1 conversation added"
    assert [one.settings for one in server.sessions.history.all()][0] == {"stop": "END\ufffd\n"}


def test_what_a_file_says_is_cleaned_and_its_settings_are_checked():
    settings = {"temperature": 99, "top_p": 0.5, "text": "x", "seed": [1], "tree": "none", "y": 1}
    text = message(content="a\0b\ud83d", role="assistant")
    more = {"title": "\x1b[31mred\n\u009b title ", "updated_at": 9e99, "settings": settings}
    [(id, found)] = read(file_of(conversation(text, **more)).encode(), TREES).conversations
    assert id == "" and found.title == "[31mred title" and found.settings == {"top_p": 0.5}
    assert found.messages[0]["content"] == "ab\ufffd"
    assert found.created_at <= found.updated_at < 9e10


def test_any_value_in_any_place_gives_a_line_or_conversations():
    """No other error, whatever stands where."""
    chance = random.Random(5)
    deep = json.loads("[" * 900 + "]" * 900)
    odd = [None, True, -1, 1.5, 10**400, "", "x" * 99, [], {}, [[]], {"a": 1}, deep, "\ud800\0"]
    refusals = 0
    for _ in range(400):
        values = json.loads(written([("a", KEPT), ("b", KEPT)]))
        gpt = json.loads(json.dumps(CHATGPT))
        for root in (values, gpt):
            places = list(containers(root))
            for _ in range(chance.randint(1, 3)):
                place = chance.choice(places)
                keys = list(place) if isinstance(place, dict) else range(len(place))
                if keys:
                    place[chance.choice(keys)] = chance.choice(odd)
            try:
                found = read(json.dumps(root).encode(), TREES).conversations
            except UsageError as error:
                refusals += 1
                assert len(str(error)) < 300
            else:
                assert all(StoredConversation.from_line(one.to_line()) for _, one in found)
    assert 200 < refusals < 800


def containers(value):
    if isinstance(value, dict | list):
        yield value
        for one in value.values() if isinstance(value, dict) else value:
            yield from containers(one)


def node(id, parent, *children, role="user", text="", **more):
    content = {"content_type": "text", "parts": [text], **more.pop("content", {})}
    told = {"author": {"role": role}, "content": content, "metadata": {"model_slug": "gpt"}, **more}
    return {"id": id, "parent": parent, "children": children, "message": told if text else None}


CHATGPT = [
    {
        "title": "A talk",
        "create_time": 1.5,
        "update_time": 2.5,
        "conversation_id": "67f0-1b",
        "current_node": "a1",
        "mapping": {
            one["id"]: one
            for one in (
                node("root", None, "sys"),
                node("sys", "root", "q", role="system", text="hidden"),
                node("q", "sys", "a1", "call", text="question"),
                node("a1", "q", role="assistant", text="first"),
                node("call", "q", "tool", role="assistant", text="search()", recipient="web"),
                node("tool", "call", "a2", role="tool", text="found"),
                node("a2", "tool", "more", role="assistant", text="second"),
                node("more", "a2", "q2", role="assistant", text="goes on"),
                node(
                    "q2", "more", text="?", content={"parts": [{"asset": "picture"}, "what is it?"]}
                ),
            )
        },
    },
    {"title": None, "mapping": {"root": node("root", None)}},
]


def test_the_export_of_chatgpt_is_read_with_its_versions():
    [(id, found)] = read(json.dumps(CHATGPT).encode(), TREES).conversations
    assert (id, found.title, found.created_at, found.updated_at) == ("67f0-1b", "A talk", 1.5, 2.5)
    path = [(one.role, one.content) for one in found.tree.path]
    assert path == [("user", "question"), ("assistant", "first")]
    assert models(found.tree.path) == ["", "gpt"]
    last = found.tree.showing(found.tree.versions(found.tree.leaf)[1])
    texts = [one["content"] for one in last.messages]
    assert texts == ["question", "second\n\ngoes on", "what is it?"]


def shown_paths(*nodes):
    """What each version of the last message of an export was said after, itself included."""
    mapping = {one["id"]: one for one in nodes}
    [(_, found)] = read(json.dumps([{"mapping": mapping}]).encode(), TREES).conversations
    leaves = [
        at for at in found.tree.said if all(one.parent != at for one in found.tree.said.values())
    ]
    return [[one["content"] for one in found.tree.showing(leaf).messages] for leaf in leaves]


def test_versions_in_an_export_of_chatgpt_are_never_one_message():
    """Two answers that were given after one call of a tool became one, and so did two questions
    that followed one without an answer."""
    assert shown_paths(
        node("q", None, "a", text="q"),
        node("a", "q", "t", role="assistant", text="I look"),
        node("t", "a", "b", "c", role="tool", text="found"),
        node("b", "t", role="assistant", text="one"),
        node("c", "t", role="assistant", text="two"),
    ) == [["q", "I look", "one"], ["q", "I look", "two"]]
    assert shown_paths(
        node("q", None, "b", "c", text="q"),
        node("b", "q", "d", text="one"),
        node("c", "q", text="two"),
        node("d", "b", role="assistant", text="answer"),
    ) == [["q", "one", "answer"], ["q", "two"]]


def test_what_an_export_of_chatgpt_lacks_costs_nothing_else():
    spoken = {"content_type": "audio_transcription", "text": "spoken", "direction": "in"}
    nothing = {"author": None, "content": {"content_type": "text"}, "recipient": None}
    voice = {"content_type": "multimodal_text", "parts": [spoken, {"asset": "sound"}]}
    assert shown_paths(
        {
            "id": "root",
            "parent": "gone",
            "children": ["none", "deleted", "odd"],
            "message": nothing,
        },
        node("odd", "root", "q", text="x", content={"parts": None}),
        node("q", "odd", "a", text="?", content=voice, recipient=None),
        node("a", "q", role="assistant", text="answer"),
    ) == [["spoken", "answer"]]
    mapping = {"none": None, "q": node("q", "none", text="q")}
    assert len(read(json.dumps([{"mapping": mapping}]).encode(), TREES).conversations) == 1


def test_what_chatgpt_never_showed_is_not_taken_in():
    hidden = {"is_visually_hidden_from_conversation": True}
    context = {"content_type": "user_editable_context", "user_profile": "x"}
    assert shown_paths(
        node("p", None, "c", text="my instructions", metadata=hidden),
        node("c", "p", "q", text="x", content=context),
        node("q", "c", "h", text="question"),
        node("h", "q", "a", role="assistant", text="unseen", metadata=hidden),
        node("a", "h", role="assistant", text="answer"),
    ) == [["question", "answer"]]


CIRCLES = [
    {"a": node("a", None, "b", text="x"), "b": node("b", "a", "a", "b", text="y")},
    {"a": node("a", "b", "b", text="x"), "b": node("b", "a", "a", text="y")},
    {"a": node("a", "a", "a", text="x")},
    {
        "r": node("r", None, text="x"),
        "a": node("a", "b", "b", text="x"),
        "b": node("b", "a", "a", text="y"),
    },
]


@pytest.mark.parametrize("circle", CIRCLES)
def test_an_entry_of_an_export_that_cannot_be_read_is_left_out_by_name(server, circle):
    good = {"title": "Good", "mapping": {"q": node("q", None, text="q")}}
    circle = {"title": "A\n\ud800 circle " + "x" * 99, "mapping": circle}
    entries = [{"title": "no map"}, good, circle, 7, {"title": "odd", "mapping": 7}]
    read_file = read(json.dumps(entries).encode(), TREES)
    assert [one.title for _, one in read_file.conversations] == ["Good"]
    assert read_file.left_out[:3] == [
        "“no map” (it has no mapping)",
        f"“A \ufffd circle {'x' * 29}” (its messages form a cycle)",
        "number 4 (it is not an object)",
    ]
    tab = said(server, "hello")
    line = server.take_file(tab.key, json.dumps(entries).encode())
    assert line.startswith("1 conversation added; 4 left out: “no map” (it has no mapping), “A ")
    assert line.endswith(" and 1 more") and line.isprintable()
    assert "1 left out: “A " in refused(json.dumps([circle]))


def test_an_answer_to_a_picture_is_a_message_of_its_own():
    picture = {"content_type": "multimodal_text", "parts": [{"asset": "x"}]}
    assert shown_paths(
        node("q", None, "a", text="q"),
        node("a", "q", "p", role="assistant", text="one"),
        node("p", "a", "b", text="x", content=picture),
        node("b", "p", role="assistant", text="two"),
    ) == [["q", "one", "two"]]


def test_an_entry_says_what_it_follows_and_others_only_where_it_does_not():
    assert shown_paths(
        node("q", None, "b", "a", text="q"),
        node("a", "q", role="assistant", text="one"),
        node("b", "q", role="assistant", text="two"),
        node("c", "b", text="unlisted"),
        {**node("d", None, text="listed"), "parent": None},
        {**node("e", "c", "d", role="assistant", text="three")},
    ) == [["q", "two", "unlisted", "three", "listed"], ["q", "one"]]


def test_the_export_of_open_webui_is_read_with_its_versions():
    def message(id, parent, *children, role="assistant", **more):
        return {"id": id, "parentId": parent, "childrenIds": children, "role": role, **more}

    folded = '<details type="reasoning" done="true">\n<summary>s</summary>\n> x\n</details>\n'
    messages = [
        message("q", None, "a", "b", role="user", content="question"),
        message("a", "q", content=f"{folded}first", model="llama3"),
        message("b", "q", "t", content="second", model="qwen3"),
        message("t", "b", role="tool", content="x"),
    ]
    history = {"messages": {one["id"]: one for one in messages}, "currentId": "a"}
    chat = {"title": "A talk", "params": {"system": "Be brief."}, "history": history}
    rows = [{"id": "67f0-1b", "created_at": 1, "updated_at": 2, "chat": chat}]
    [(id, found)] = read(json.dumps(rows).encode(), TREES).conversations
    assert (id, found.title, found.system) == ("67f0-1b", "A talk", "Be brief.")
    assert (found.created_at, found.updated_at) == (1.0, 2.0)
    assert [one.content for one in found.tree.path] == ["question", "first"]
    assert models(found.tree.said.values()) == ["", "llama3", "qwen3"]


@pytest.mark.parametrize("part", ["[]", "{}", '{"a": []}'])
def test_a_file_of_many_empty_lists_is_refused_before_all_is_read(monkeypatch, part):
    monkeypatch.setattr(conversations_file, "MAX_LISTS", 1000)
    assert "more than 1,000 lists and objects" in refused(f"[{f'{part},' * 1000} oops")
    assert "not valid JSON" in refused(f"[{f'{part},' * 400} oops")


def test_other_threads_run_while_a_file_is_read():
    """json.loads holds them until it is done: every tab waited, for seconds."""
    turns, is_over = [], threading.Event()

    def turn():
        while not is_over.wait(0.001):
            turns.append(None)

    beside = threading.Thread(target=turn)
    beside.start()
    turns.clear()
    refused(f"[{'[],' * 600_000}[]]")
    seen = len(turns)
    is_over.set()
    beside.join()
    assert seen > 20


def test_a_guest_saves_their_own_and_nothing_of_theirs_is_taken_in(server):
    said(server, "of the owner")
    tab = Tab()
    rows = json.loads(server.attach(tab, None, guest("1")).conversations)
    assert (rows["key"], rows["takes"]) == (tab.key, False)
    server.send(tab, turn("of the guest"))
    ended(server.session_of(tab))
    text = server.save_all(tab.key)
    assert [one["title"] for one in json.loads(text)["conversations"]] == ["of the guest"]
    assert server.take_file(tab.key, text.encode()) is None and titles(server) == ["of the owner"]
    assert server.save_all("guess") is None is server.take_file("guess", b"")


@pytest.fixture(params=[None, ("me", "secret")], ids=["open", "login"])
def client(request, session, tmp_path, monkeypatch):
    monkeypatch.setitem(guard.LARGEST, guard.CHATS, 5 * 1024 * 1024)
    page = open_page(session, PageOptions(auth=request.param, history=History(tmp_path / FILE)))
    with httpx.Client(base_url=page.url, timeout=30) as client:
        client.login = {"username": "me", "password": "secret"} if request.param else {}
        client.controller = next(m for m in page.blocks.app.user_middleware if "save" in m.kwargs)
        yield client
    page.close()


def test_a_file_goes_and_comes_by_the_tabs_key_alone(client):
    controller = client.controller.kwargs["save"].__self__
    tab = said(controller, "hello")
    key = {TAB_HEADER: tab.key}
    if client.login:
        assert client.get("chats", headers=key).status_code == 401
        assert client.post("chats", headers=key, content=b"x" * 70_000).status_code == 413
        assert client.post("login", data=client.login).status_code == 200
    assert client.get("chats").status_code == client.post("chats").status_code == 404
    for wrong in ({"host": "evil.example"}, {"origin": "http://evil.example"}):
        assert client.post("chats", headers=key | wrong).status_code == 403
    answer = client.get("chats", headers=key)
    assert answer.json()["format"] == FORMAT and answer.headers["cache-control"] == "no-store"
    answer = client.post("chats", headers=key, content=b"[]")
    assert (answer.status_code, answer.text) == (
        400,
        "it holds no conversations of medusa-chat, ChatGPT or Open WebUI",
    )
    large = file_of(*(conversation(message(content=c * 900_000)) for c in "abcde"))
    answer = client.post("chats", headers=key, content=large)  # more than other requests may have
    assert answer.text == "5 conversations added"
    assert client.post("chats", headers=key, content=b"x" * 6_000_000).status_code == 413
    assert client.post("run/predict", headers=key, content=b"x" * 4_500_000).status_code == 413


def test_reasoning_stays_apart_in_a_file_and_is_taken_out_of_older_ones():
    tree = MessageTree().plus("user", "hi").plus("assistant", "Yes <think>", reasoning="Hm")
    ((_, again),) = read(written([("a", StoredConversation(tree))]).encode(), TREES).conversations
    old = message(2, 1, "assistant", "<think>\nHm\n</think>\n\nYes <think>")
    ((_, one),) = read(file_of(conversation(message(), old)).encode(), TREES).conversations
    assert again.messages == one.messages == tree.messages
    assert tree.messages[1]["reasoning"] == "Hm"
