"""The page with a share link, and visitors of it."""

from collections.abc import Iterator
from typing import Any

import pytest

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.tunnel import Tunnel
from medusa_chat.ui.app import Page, PageOptions, open_page
from support.page import DESK, READY, SLOW, browser_or_skip, chromium, wait_attached
from support.scripted import ScriptedRunner

SHARED = "http://abc123.gradio.live"
# How many modules of the page's scripts this visitor gets, and how many there are.
MODULES = """async () => {
  const all = [...document.querySelectorAll('link[rel=modulepreload]')];
  const got = await Promise.all(all.map(({ href }) => fetch(href)));
  return [got.filter(({ ok }) => ok).length, all.length];
}"""


def scripted(**options) -> Session:
    session = Session(ScriptedRunner(delay=0.01, prefill=0.01, steps=12, **options))
    session.submit(LoadRequest())
    return session


@pytest.fixture(scope="module")
def opened() -> Iterator[Page]:
    browser_or_skip()
    session = scripted()
    page = open_page(session, PageOptions(trees=("chain",)))
    yield page
    page.close()
    session.close()


@pytest.fixture(scope="module")
def guest_browser(opened) -> Iterator:
    """A browser for which every shared link is the entrance for guests."""
    rules = f"--host-resolver-rules=MAP *.gradio.live 127.0.0.1:{opened.guests.open()}"
    with chromium("--no-sandbox", "--disable-gpu", rules) as chrome:
        yield chrome


def open_profile(chrome, url: str, selector: str = READY, **options):
    """A page in a browser profile of its own, once `selector` is there."""
    context = chrome.new_context(**{"viewport": DESK, "reduced_motion": "reduce"} | options)
    context.set_default_timeout(SLOW)
    tab = context.new_page()
    tab.goto(url)
    tab.wait_for_selector(selector)
    if selector == READY:
        wait_attached(tab)
    return tab


@pytest.fixture
def visitor(guest_browser) -> Iterator:
    """Opens pages, each in a browser profile of its own."""
    contexts = []

    def opens(url: str, selector: str = READY, **options):
        tab = open_profile(guest_browser, url, selector, **options)
        contexts.append(tab.context)
        return tab

    yield opens
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def kept(guest_browser) -> Iterator[dict[str, Any]]:
    """The tabs of `resident`, by their address."""
    tabs: dict[str, Any] = {}
    yield tabs
    for tab in tabs.values():
        tab.context.close()


@pytest.fixture
def resident(request, kept, guest_browser) -> Iterator:
    """Opens the one page of an address that a module's tests share, for what needs no first visit:
    a page takes three seconds of a processor to open. Each test leaves it as it was, its
    conversation apart; that of a test that failed is not used again."""
    failed, used = request.session.testsfailed, []

    def opens(url: str):
        if url not in kept:
            kept[url] = open_profile(guest_browser, url)
        used.append(url)
        return kept[url]

    yield opens
    if request.session.testsfailed != failed:
        for url in used:
            kept.pop(url).context.close()


@pytest.fixture
def tunnel(opened) -> Iterator[list[Tunnel]]:
    """The tunnels that were made; they lead into the same machine."""
    made: list[Tunnel] = []

    def make(port: int) -> Tunnel:
        made.append(Tunnel(SHARED, lambda: None))
        return made[-1]

    opened.share._open = make
    yield made
    opened.share.stop()
