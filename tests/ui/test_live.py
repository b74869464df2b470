"""The stream of an answer beside Gradio's queue: who gets it, and that nothing of it is lost."""

import asyncio
import json
import time

import httpx
import pytest
from support.conversations import known, owner
from support.scripted import ScriptedRunner

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.app import PageOptions, open_page
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.controller import ChatController
from medusa_chat.ui.page.inputs import checked
from medusa_chat.ui.page.live import TAB_HEADER, Update, packed

STEPS = 300


@pytest.fixture
def controller():
    session = Session(ScriptedRunner(delay=0.001, prefill=0.01, steps=STEPS, nodes=4))
    list(session.lifecycle.run(LoadRequest()))
    yield ChatController(session, ())
    session.close()


def told(events: list[str]) -> list[dict]:
    return [json.loads(event[6:]) for event in events if event.startswith("data: ")]


def folded(updates: list[dict]) -> Update:
    """What a page that follows has in the end."""
    live, text, panel = "", "", None
    for update in updates:
        live += update.get("live", "")
        text = update["text"] if "text" in update else text + update.get("more", "")
        panel = update.get("panel", panel)
    return Update(live, text, json.dumps(panel))


async def gathered(stream) -> list[str]:
    return [event async for event in stream]


def packs(*updates: Update) -> list[str]:
    async def given():
        for update in updates:
            yield update

    return asyncio.run(gathered(packed(given())))


def test_what_comes_in_parts_is_what_was_said(controller):
    tab = Tab()
    controller.send(tab, checked({"text": "hi"}, ()))
    updates = told(asyncio.run(gathered(packed(controller.updates_of(tab.key)))))
    chat = controller.session_of(tab)
    last = folded(updates)
    assert len(updates) > 3
    assert last.text == chat.answer.text and last.live == chat.answer.live
    assert json.loads(last.panel)["figures"]["steps"] == len(chat.answer.steps)


def test_every_bar_is_sent_and_hardly_one_twice(controller):
    tab = Tab()
    controller.send(tab, checked({"text": "hi"}, ()))
    panels = [
        update["panel"]
        for update in told(asyncio.run(gathered(packed(controller.updates_of(tab.key)))))
        if update.get("panel")
    ]
    steps = [len(step.token_ids) for step in controller.session_of(tab).answer.steps]
    sent = {
        panel["first"] + place: tokens
        for panel in panels
        for place, tokens in enumerate(panel["bars"])
    }
    assert sent == dict(enumerate(steps))
    assert sum(len(panel["bars"]) for panel in panels) < 1.5 * len(steps)


def test_an_update_without_news_is_a_comment_and_a_text_that_changes_is_sent_whole():
    one, same = Update("a\n", "so <b>", "{}"), Update("a\n", "so <b>", "{}")
    events = packs(
        one, same, Update("a\nb\n", "so <b>\u2028\n\n1", ""), Update("a\nb\n", "other", "")
    )
    assert events[1] == ":\n\n"
    assert all(event.count("\n") == 2 and "<" not in event for event in events)
    first, then, last = told(events)
    assert first == {"live": "a\n", "text": "so <b>", "panel": {}}
    assert then == {"live": "b\n", "more": "\u2028\n\n1", "panel": None}
    assert last == {"text": "other"}


def test_what_changes_elsewhere_in_the_room_is_told_once(controller):
    tab, other = owner(), owner()
    controller.send(tab, checked({"text": "hi"}, ()))
    controller.attach(other, known(tab))

    async def meanwhile():
        events = []
        async for event in packed(controller.updates_of(tab.key)):
            events.append(event)
            if len(events) == 2:
                controller.send(other, checked({"text": "from the other"}, ()))
        return told(events)

    updates = asyncio.run(meanwhile())
    assert sum("refresh" in update for update in updates) == 1


def test_a_tab_has_one_stream_and_a_tab_that_is_gone_has_none(controller):
    tab = Tab()
    controller.send(tab, checked({"text": "hi"}, ()))

    key = tab.key

    async def both():
        first = controller.updates_of(key)
        await anext(first)
        assert await gathered(controller.updates_of(key)) == []
        await first.aclose()

    asyncio.run(both())
    assert key and controller.updates_of(key) is not None
    assert controller.updates_of("") is None and controller.updates_of(f"{key}x") is None
    del tab
    assert controller.updates_of(key) is None


@pytest.fixture(scope="module", params=[None, ("me", "secret")], ids=["open", "login"])
def opened(request):
    session = Session(ScriptedRunner(delay=0.02, prefill=0.01, steps=2000, nodes=4))
    list(session.lifecycle.run(LoadRequest()))
    page = open_page(session, PageOptions(auth=request.param))
    yield page, session
    page.close()
    session.close()


def begin(client: httpx.Client, page) -> str:
    """Send a message as the page does; the key of the tab's stream."""
    fns = page.blocks.fns
    number = next(n for n, fn in fns.items() if fn.api_name == "send")
    made = fns[number].inputs
    data = [None if c.get_block_name() == "state" else c.value for c in made]
    data[[c.elem_id for c in made].index("box")] = "hi"
    asked = {"data": data, "fn_index": number, "session_hash": f"live{time.time_ns():x}"}
    answer = client.post("gradio_api/run/predict", json=asked).raise_for_status()
    lines = [json.loads(line) for line in answer.json()["data"] if _is_next(line)]
    return lines[0]["key"]


def _is_next(line: object) -> bool:
    return isinstance(line, str) and line.startswith('{"pending"')


def test_the_stream_is_for_the_tab_and_for_who_has_logged_in(opened):
    page, _ = opened
    with httpx.Client(base_url=page.url, timeout=30) as client:
        if page.auth:
            user, password = page.auth
            login = client.post("login", data={"username": user, "password": password})
            assert login.status_code == 200
        key = begin(client, page)
        assert client.get("live").status_code == 404
        assert client.get("live", headers={TAB_HEADER: "guess"}).status_code == 404
        evil = {TAB_HEADER: key, "host": "evil.example"}
        assert client.get("live", headers=evil).status_code == 403
        with client.stream("GET", "live", headers={TAB_HEADER: key}) as stream:
            assert stream.status_code == 200
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.headers["cache-control"] == "no-store"
            assert "Content-Security-Policy" in stream.headers
            lines = stream.iter_lines()
            update = next(line for line in lines if line.startswith("data: "))
            assert {"live", "panel"} <= set(json.loads(update[6:]))
    stranger = httpx.get(f"{page.url}live", headers={TAB_HEADER: key})
    assert stranger.status_code == (401 if page.auth else 200)
