"""What the server keeps of a tab: little, and no longer than the tab is there."""

import gc
import tracemalloc
from collections.abc import Callable, Iterator

import httpx
import pytest
from support.http_tab import HttpTab
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access import own_states
from medusa_chat.ui.app import Page, open_page

KB = 1024


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """Of a model that answers at once, without a tree, whose steps would be kept for the page."""
    plain = {"drafter": "none"}
    session = Session(ScriptedRunner(delay=0.0, prefill=0.0, steps=3, forced=plain))
    session.submit(LoadRequest())
    opened = open_page(session)
    yield opened
    opened.close()
    session.close()


@pytest.fixture
def client(page: Page) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=page.url, timeout=60) as made:
        yield made


@pytest.fixture
def states(page: Page) -> own_states.OwnStates:
    return page.blocks.state_holder


def growth(act: Callable[[], object], times: int) -> float:
    """Bytes that stay allocated for each time, once the first ones have filled what is shared."""
    for _ in range(3):
        act()
    gc.collect()
    tracemalloc.start()
    try:
        for _ in range(times):
            act()
        gc.collect()
        return tracemalloc.get_traced_memory()[0] / times
    finally:
        tracemalloc.stop()


def test_an_open_tab_takes_little_memory(client):
    config = client.get("/config").json()
    # 100 KB on Python 3.11; with a copy of the configuration, as Gradio keeps it, seven times that
    assert growth(lambda: HttpTab(client, config=config).open(), 10) < 150 * KB


def test_an_answer_leaves_nothing_but_the_conversation(client, states):
    tab = HttpTab(client)
    tab.open()
    tab.ask("hi")
    blocks = len(states[tab.name].blocks_config.blocks)
    assert growth(lambda: tab.ask("hi"), 8) < 30 * KB
    assert len(states[tab.name].blocks_config.blocks) == blocks == len(tab.components)


def test_an_event_finds_a_block_as_the_one_before_has_left_it(client, states):
    tab = HttpTab(client)
    tab.open()
    tab.ask("hi")
    kept = states[tab.name].blocks_config.blocks
    assert all(block._id == id for id, block in kept.items())


def test_what_is_kept_of_a_tab_goes_when_its_connection_has_ended(client, states, monkeypatch):
    tab = HttpTab(client)
    with tab.connected():
        tab.open()
    wait_for(lambda: states.session_data[tab.name].is_closed)
    assert tab.tick().status_code == 200  # a link that broke for a moment
    monkeypatch.setattr(own_states, "CLOSED_SECONDS", 0.0)
    wait_for(lambda: tab.name not in states)


def test_a_tab_that_was_never_closed_goes_when_it_gives_no_sign(client, states, monkeypatch):
    tab = HttpTab(client)
    tab.open()
    monkeypatch.setattr(own_states, "CLOSED_SECONDS", 0.0)
    states.delete_all_expired_state()
    assert tab.name in states
    monkeypatch.setattr(own_states, "IDLE_SECONDS", 0.0)
    wait_for(lambda: tab.name not in states)


def test_a_tab_that_comes_back_too_late_is_told_to_load_itself_again(client, states):
    """link.js does so at 409. A state made anew would show nothing and answer elsewhere."""
    tab = HttpTab(client)
    tab.open()
    states._end(tab.name)
    answer = tab.tick()
    assert answer.status_code == 409 and "load the page again" in answer.text
    assert HttpTab(client).open().status_code == 200


def test_the_longest_unused_tab_goes_where_there_are_too_many(client, states, monkeypatch):
    tabs = [HttpTab(client) for _ in range(3)]
    monkeypatch.setattr(own_states, "MAX_STATES", 2)
    for tab in tabs:
        tab.open()
    assert list(states.session_data) == [tab.name for tab in tabs[1:]]
    assert tabs[0].tick().status_code == 409


def test_a_tab_has_a_short_name(client, states):
    tab = HttpTab(client, "x" * 5000)
    assert tab.tick().status_code == 400 and tab.name not in states


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "queue/data?session_hash=nobody"),
        ("GET", "call/send/nothing"),
        ("POST", "queue/join"),
        ("POST", "call/send"),
        ("POST", "call/v2/send"),
        ("POST", "cancel"),
        ("POST", "reset"),
    ],
)
def test_nothing_is_queued_and_nothing_is_told_of_a_queue(client, capfd, method, path):
    """A GET wrote 88 lines into the owner's terminal; what was queued stayed for good."""
    answer = client.request(method, f"/gradio_api/{path}", json={"session_hash": "nobody"})
    assert answer.status_code == 404 and answer.text == "this page has nothing here"
    assert capfd.readouterr() == ("", "")


def test_no_event_of_the_page_waits_in_gradios_queue(client):
    events = client.get("/config").json()["dependencies"]
    assert events and not any(one["queue"] for one in events)
