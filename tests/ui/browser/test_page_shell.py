"""What is around the chat, in a real browser: header, first paint, Share, guests, a lost server."""

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route
from support.page import READY, ask, last_answer, send, wait_end
from support.shell import MODULES, SHARED, scripted
from support.waiting import wait_for

from medusa_chat.messages import LoadRequest
from medusa_chat.paths import data_dir
from medusa_chat.runtime.history import FILE, History
from medusa_chat.ui.access.share import qr_of
from medusa_chat.ui.access.tunnel import NO_INTERNET, ShareError, Tunnel
from medusa_chat.ui.app import PageOptions, open_page

TESTS = Path(__file__).parents[2]


def shows(tab, selector: str, text: str) -> None:
    tab.wait_for_function(
        "([s, t]) => document.querySelector(s)?.textContent.includes(t)", arg=[selector, text]
    )


# ---- first paint, layout, colours ----


def test_the_page_is_there_before_its_script_and_does_not_jump(opened, visitor, guest_browser):
    raw = httpx.get(opened.url, headers={"accept": "text/html"}).text
    assert raw.index('id="first"') < raw.index("<gradio-app")
    assert "<title>medusa-chat</title>" in raw and 'name="description"' in raw
    assert 'property="og:' not in raw and "githubusercontent" not in raw
    context = guest_browser.new_context(viewport={"width": 1280, "height": 900})
    empty = {"body": "", "content_type": "text/javascript"}  # a lost one would be loaded again
    context.route("**/assets/index-*.js", lambda route: route.fulfill(**empty))
    tab = context.new_page()
    tab.goto(opened.url)
    first = tab.locator(".first-bar").bounding_box()
    assert tab.inner_text(".first-bar b") == "medusa-chat"
    context.close()
    tab = visitor(opened.url)
    tab.wait_for_selector("#first", state="detached")
    assert tab.locator("#header").bounding_box()["height"] == first["height"]
    shift = """() => new Promise(done => new PerformanceObserver(list =>
        done(list.getEntries().reduce((sum, entry) => sum + entry.value, 0)))
        .observe({type: 'layout-shift', buffered: true}) || setTimeout(() => done(0), 500))"""
    assert tab.evaluate(shift) < 0.02


def test_the_header_and_the_chat_are_there_before_the_model(visitor):
    session = scripted(is_load_held=True)
    page = open_page(session, PageOptions())
    try:
        tab = visitor(page.url, '.status-line[data-status="loading"]')
        shows(tab, ".status-line .sentence", "reading weights")
        assert tab.is_visible("#box textarea") and tab.is_visible("#brand h1")
        assert "processing" not in tab.inner_text("#header")
    finally:
        page.close()
        session.close()


def test_a_failed_load_says_what_to_do_and_is_tried_again_by_a_button(visitor):
    session = scripted()
    session.runner.load = lambda request: iter(_refuse())
    page = open_page(session, PageOptions())
    try:
        session.submit(LoadRequest())
        tab = visitor(page.url, '.status-line[data-status="failed"]')
        assert "No checkpoint here: choose another" in tab.inner_text(".status-line .sentence")
        del session.runner.load  # what was wrong is mended
        tab.click(".status-line .again:visible")
        tab.wait_for_selector(READY)
        assert not tab.is_visible(".status-line .again")
    finally:
        page.close()
        session.close()


def _refuse():
    from medusa_chat.errors import ModelError

    raise ModelError("no checkpoint here: choose another with --checkpoint")
    yield


def test_the_chat_fills_the_window(opened, resident):
    tab = resident(opened.url)
    left = tab.locator("#left").bounding_box()
    assert 870 < left["y"] + left["height"] <= 900
    assert tab.evaluate("document.documentElement.scrollHeight") <= 900


def test_details_are_a_table_of_ten_facts_with_the_log_folded_behind_it(opened, resident):
    tab = resident(opened.url)
    facts = tab.locator(".status-line .fact").all_inner_texts()
    assert [fact.split()[0] for fact in facts] == ["model", "precision", "device"]
    tab.click(".status-line .notes summary")
    names = tab.locator(".model-details th").all_inner_texts()
    assert names == [
        *("model", "precision", "device", "memory", "context"),
        *("drafter", "tree", "backend", "template", "licence"),
    ]
    assert "cut to 16 nodes on a CPU" in tab.inner_text(".model-details")
    assert not tab.is_visible(".load-log li")
    tab.click(".load-log summary")
    assert tab.locator(".load-log li:visible").count() > 0
    tab.click(".load-log summary")
    tab.keyboard.press("Escape")
    assert not tab.is_visible(".model-details")


def test_the_list_of_why_is_over_all_of_the_page(opened, resident):
    tab = resident(opened.url)
    tab.get_by_role("tab", name="Models").click()
    tab.wait_for_selector("#models-column [data-testid=block-info]:visible")
    tab.click(".status-line .notes summary")
    notes = tab.locator(".status-line .menu")
    under = notes.evaluate(
        """list => {
          Object.assign(list.style, {height: '700px', width: '900px', maxHeight: 'none'});
          const {left, top} = list.getBoundingClientRect();
          const found = [];
          for (let x = 5; x < 900; x += 10) for (let y = 5; y < 700; y += 10) {
            const at = document.elementFromPoint(left + x, top + y);
            if (at && at !== list && !list.contains(at)) found.push(at.outerHTML.slice(0, 90));
          }
          return found;
        }"""
    )
    assert under == []
    notes.evaluate("list => list.removeAttribute('style')")
    tab.keyboard.press("Escape")
    tab.get_by_role("tab", name="Chat").click()


def test_light_or_dark_is_remembered_and_there_from_the_first_frame(opened, resident):
    tab = resident(opened.url)
    tab.emulate_media(color_scheme="light")
    is_dark = "document.body.classList.contains('dark')"
    assert not tab.evaluate(is_dark)
    for look, dark in (("light", False), ("dark", True)):
        tab.click("#look .tool")
        assert tab.get_attribute("#look .tool", "aria-label") == f"Colours: {look}"
        assert tab.evaluate(is_dark) is dark
    later = tab.context.new_page()
    later.route("**/assets/index-*.js", lambda route: None)  # it never comes
    later.goto(opened.url, wait_until="commit")
    later.wait_for_selector("#first")
    assert later.evaluate(is_dark)
    later.close()
    tab.click("#look .tool")
    assert tab.get_attribute("#look .tool", "aria-label") == "Colours: system"
    assert not tab.evaluate(is_dark)


# ---- sharing ----


def test_without_internet_share_is_one_plain_sentence(opened, resident, tunnel):
    def offline(port: int) -> Tunnel:
        raise ShareError(NO_INTERNET)

    opened.share._open = offline
    tab = resident(opened.url)
    tab.get_by_role("button", name="Share", exact=True).click()
    tab.get_by_role("button", name="Make a link").click()
    shows(tab, ".share-message", "No internet")
    tab.keyboard.press("Escape")
    ask(tab, "still here")


def test_share_shows_the_link_and_a_guest_has_a_chat_of_their_own(opened, visitor, tunnel):
    owner = visitor(opened.url)
    ask(owner, "the owner's own words")
    owner.get_by_role("button", name="Share", exact=True).click()
    owner.select_option("#share-hours", "1")
    owner.get_by_role("button", name="Make a link").click()
    owner.wait_for_selector(".share-qr")
    link = opened.share.link
    assert link.expires - time.time() <= 3600
    assert owner.get_attribute(".share-qr", "src") == qr_of(link.address)
    assert owner.input_value("#share-password") == link.password
    assert "60 minutes" in owner.inner_text(".share-dialog")

    guest = visitor(SHARED, "form")
    guest.get_by_label("Password").fill("wrong")
    guest.keyboard.press("Enter")
    guest.wait_for_selector("[role=alert]")
    guest.get_by_label("Password").fill(link.password.replace("-", " "))
    guest.get_by_role("button", name="Come in").click()
    guest.wait_for_selector(READY)
    assert "the owner's own words" not in guest.content()
    assert guest.locator("#history .bot").count() == 0
    assert not guest.locator("#share").get_by_role("button").is_visible()
    assert link.password not in guest.content()
    found, of = guest.evaluate(MODULES)
    assert found == of > 50
    ask(guest, "a guest's words")
    assert last_answer(guest)
    assert "a guest's words" not in owner.content()

    owner.get_by_role("button", name="Stop sharing").click()
    shows(guest, "#lost", "This link has ended")
    guest.reload()
    assert "This link has ended" in guest.inner_text("body")


def test_the_qr_codes_link_lets_in_without_the_password_and_expires(opened, visitor, tunnel):
    opened.share.begin(1).join()
    link = opened.share.link
    guest = visitor(link.address)
    assert link.key not in guest.url and link.key not in guest.content()
    past = opened.share._clock
    opened.share._clock = lambda: link.expires
    try:
        shows(guest, "#lost", "This link has ended")
        guest.goto(link.address)
        assert "This link has ended" in guest.inner_text("body")
    finally:
        opened.share._clock = past


def test_a_guest_who_is_not_known_any_more_is_asked_for_the_password(opened, visitor, tunnel):
    opened.share.begin(1).join()
    guest = visitor(opened.share.link.address)
    guest.fill("#box textarea", "half a sentence")
    guest.context.clear_cookies()
    guest.wait_for_selector("#password")
    guest.fill("#password", opened.share.link.password)
    guest.keyboard.press("Enter")
    guest.wait_for_function("document.querySelector('#box textarea')?.value === 'half a sentence'")


# ---- the server is gone and comes back ----

# The program as people start it, `python -m medusa_chat`, its worker's start included; a line to
# it is answered with what of the model's packages its own process has imported.
STARTED = """
import runpy
import sys
import threading

def tell():
    for _ in sys.stdin:
        print([name for name in ("torch", "transformers") if name in sys.modules], flush=True)

threading.Thread(target=tell, daemon=True).start()
sys.argv[1:] = ["--no-browser", "--port", sys.argv[1]]
runpy.run_module("medusa_chat", run_name="__main__", alter_sys=True)
"""


@contextlib.contextmanager
def program(port: int) -> Iterator[subprocess.Popen[str]]:
    """The program with its page; killed at the end, as when a laptop is closed."""
    places = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, places))}
    command = sys.executable, "-c", STARTED, str(port)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment) as child:
        try:
            assert "is open at" in child.stdout.readline()
            yield child
        finally:
            child.kill()


def imported(child: subprocess.Popen[str]) -> str:
    """What the program says of its imports."""
    child.stdin.write("\n")
    child.stdin.flush()
    return child.stdout.readline().strip()


def test_a_running_page_has_no_torch_and_when_its_server_is_lost_comes_back_with_what_was_said(
    visitor,
):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with program(port) as child:
        tab = visitor(f"http://127.0.0.1:{port}/")
        tab.fill("#box textarea", "What is the capital of Spain?")
        tab.click("#send")  # the answer may be over before its Stop is seen
        tab.wait_for_selector("#history .bot .message-content")
        wait_end(tab)
        answer = last_answer(tab)
        assert imported(child) == "[]"
        tab.fill("#box textarea", "half a sentence")
    tab.wait_for_selector("#lost >> text=No connection to medusa-chat")
    assert not tab.locator(".toast-wrap").is_visible()
    tab.evaluate("window.isOld = true")
    session = scripted()  # answers at once; what was said before is on the disk
    options = PageOptions(port=port, history=History(data_dir() / FILE))
    page = open_page(session, options)
    try:
        tab.wait_for_function("!window.isOld && document.querySelector('#header')")
        tab.wait_for_function("document.querySelector('#box textarea')?.value.startsWith('half')")
        assert not tab.is_visible("#lost")
        assert last_answer(tab) == answer
    finally:
        page.close()
        session.close()


@contextlib.contextmanager
def proxied(behind: int, at: int, keeps: bool) -> Iterator[None]:
    """A small reverse proxy that has the page at /chat. keeps: it leaves the prefix on."""
    client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{behind}", timeout=None)

    async def forward(request: Request) -> StreamingResponse:
        path = request.url.path if keeps else request.url.path.removeprefix("/chat") or "/"
        url = httpx.URL(path=path, query=request.url.query.encode())
        headers = request.headers.raw
        body = await request.body()
        asked = client.build_request(request.method, url, headers=headers, content=body)
        got = await client.send(asked, stream=True)
        kept = {"content-type", "content-encoding", "location", "set-cookie", "cache-control"}
        passed = {name: value for name, value in got.headers.items() if name in kept}
        done = BackgroundTask(got.aclose)
        return StreamingResponse(got.aiter_raw(), got.status_code, passed, background=done)

    methods = ["GET", "HEAD", "POST", "OPTIONS"]
    app = Starlette(routes=[Route("/chat{rest:path}", forward, methods=methods)])
    server = uvicorn.Server(uvicorn.Config(app, port=at, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.mark.parametrize(("kind", "keeps"), [("path", False), ("address", True)])
def test_the_page_works_behind_a_reverse_proxy(visitor, keeps, kind):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = free.getsockname()[1]
    session = scripted()
    session.runner.hold_at = 10  # nobody waits for the end
    root_path = "/chat" if kind == "path" else f"http://127.0.0.1:{at}/chat"
    page = open_page(session, PageOptions(root_path=root_path))
    try:
        with proxied(page.blocks.server_port, at, keeps):
            tab = visitor(f"http://127.0.0.1:{at}/chat/")
            send(tab, "hello through the proxy")
            tab.wait_for_function("document.querySelector('.live-text')?.textContent.length > 20")
            tab.dispatch_event("#stop", "click")
            wait_end(tab)
            assert last_answer(tab)
            tab.context.close()
    finally:
        page.close()
        session.close()
