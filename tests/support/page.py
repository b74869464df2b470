"""The page with a scripted model in a real browser."""

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.requests import MeasureMemory
from medusa_chat.runtime.session import Session
from support.scripted import ScriptedRunner
from support.waiting import wait_for

# Without a window's own parts a page costs three quarters of the processor's time.
CHROMIUM = shutil.which("chromium-headless-shell") or shutil.which("chromium")
# Every outside address is unknown. Intercepting requests would do it too, but turns the browser's
# cache off, and each tab then reads all of Gradio's scripts anew.
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
SLOW = 180_000  # milliseconds for a busy machine
READY = '.status-line[data-status="ready"]'
DESK = {"width": 1280, "height": 900}


def browser_or_skip() -> None:
    """Skips with the reason, but never in CI."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        reason = "playwright is not installed: pip install playwright"
    else:
        reason = "" if CHROMIUM else "chromium is not on the PATH: apt install chromium"
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)


@dataclass
class Served:
    """A page that is open. runner: None when a real model answers. server: uvicorn's."""

    url: str
    session: Session
    runner: ScriptedRunner | None
    server: Any = None

    def cut(self) -> None:
        """End every connection to the page at once, as a link does that breaks."""
        for one in list(self.server.server_state.connections):
            one.loop.call_soon_threadsafe(one.transport.abort)


@contextmanager
def page_of(session: Session, **options: Any) -> Iterator[Served]:
    """The page of a session while the block runs; then both are closed. options: PageOptions.
    Skips where there is no browser for it."""
    from medusa_chat.ui.app import PageOptions, open_page

    browser_or_skip()
    page = open_page(session, PageOptions(**options))
    runner = session.runner if isinstance(session.runner, ScriptedRunner) else None
    yield Served(page.url, session, runner, page.blocks.server)
    page.close()
    session.close()


@contextmanager
def scripted_page(runner: ScriptedRunner, **options: Any) -> Iterator[Served]:
    """As page_of, of a session whose scripted model is loaded."""
    session = Session(runner)
    session.submit(LoadRequest())
    with page_of(session, trees=("chain",), **options) as page:
        yield page


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    """A page that answers at once; modules have others of this name."""
    with scripted_page(ScriptedRunner(delay=0.03, prefill=0.15, steps=50, nodes=16)) as page:
        yield page


@pytest.fixture
def runner(served) -> Iterator[ScriptedRunner]:
    """The script, as it was again after the test."""
    before = dict(vars(served.runner))
    yield served.runner
    vars(served.runner).update(before)


@pytest.fixture
def quick(runner, monkeypatch) -> ScriptedRunner:
    """Short answers, for what happens between them."""
    monkeypatch.setattr(runner, "steps", 4)
    monkeypatch.setattr(runner, "prefill", 0.02)
    runner.prompts.clear()
    return runner


@contextmanager
def chromium(*arguments: str) -> Iterator:
    """A browser while the block runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chrome = play.chromium.launch(executable_path=CHROMIUM, args=arguments or ARGUMENTS)
        yield chrome
        chrome.close()


@pytest.fixture(scope="module")
def browser(served) -> Iterator:
    with chromium() as chrome:
        yield chrome


@dataclass
class Person:
    """A profile of the browser. Kept between tests, as is a tab of it that is as it was opened: a
    page takes two seconds of a processor to open, and what it has just said a tenth to clear."""

    context: Any
    tab: Any = None


@pytest.fixture(scope="module")
def people(browser) -> Iterator[dict[int, Person]]:
    found: dict[int, Person] = {}
    yield found
    for person in found.values():
        person.context.close()


@pytest.fixture
def open_tab(request, served, browser, people) -> Iterator:
    """Opens tabs in which every request to an outside address is a failure. person: tabs of one
    number share a browser, its storage and so its conversation. is_new: not a tab of before."""
    here, asked, faults = {}, [], []
    failed = request.session.testsfailed

    def note(request):
        asked.append(request)

    def fault(error):
        faults.append(str(error))

    def come(number):
        if number not in people:
            context = browser.new_context(viewport=DESK)
            context.set_default_timeout(SLOW)
            people[number] = Person(context)
        here[number] = people[number]
        here[number].context.on("request", note)

    def opened(person=0, is_new=False):
        is_first = person not in here
        if is_first:
            come(person)
        known = here[person]
        if is_first and known.tab and not is_new:
            tab = known.tab
            start_anew(tab)
        else:
            if is_first and known.tab:
                known.tab.close()
            tab = known.context.new_page()
            if is_first:
                forget(tab, served.url)
                known.tab = tab
            tab.goto(served.url)
            tab.wait_for_selector(READY)
            wait_attached(tab)
        tab.on("pageerror", fault)
        return tab

    yield opened
    end_answers(served)
    is_well = request.session.testsfailed == failed
    for person in here.values():
        person.context.remove_listener("request", note)
        for tab in person.context.pages:
            if tab is not person.tab or not is_well or not is_as_opened(tab):
                tab.close()
        if person.tab.is_closed():
            person.tab = None
        else:
            person.tab.remove_listener("pageerror", fault)
    assert outside(served, asked) == [], "the page asked for something outside this machine"
    assert faults == [], f"a script of the page failed: {faults}"


def end_answers(served: Served) -> None:
    """No answer of one test runs on in the next, where it may be held for good."""
    if served.runner is None:
        return
    last = served.session.submit(MeasureMemory())

    def ended() -> bool:
        served.runner.stop()
        return last.done.is_set()

    wait_for(ended)


def forget(tab, url: str) -> None:
    """Clear what the page stored in the profile of an empty tab."""
    client = tab.context.new_cdp_session(tab)
    kinds = {"origin": url.rstrip("/"), "storageTypes": "cookies,local_storage"}
    client.send("Storage.clearDataForOrigin", kinds)
    client.detach()


def is_as_opened(tab) -> bool:
    """Whether nothing but its conversation was changed in a tab: no setting, pace or colours. That
    the list of conversations is open is no change."""
    return tab.evaluate(
        """usual => Object.keys(localStorage).every(key => usual.includes(key)) &&
          !document.querySelector('#vanilla input')?.checked""",
        ["medusa-chat", "medusa-chat-list"],
    )


def keep_no_settings(tab) -> None:
    """For a test that has put its settings back: as in a new tab none are stored, so that this one
    is used again."""
    tab.evaluate("localStorage.removeItem('medusa-chat-settings')")


def start_anew(tab) -> None:
    """An empty conversation on the chat's tab, at the size of a new tab."""
    tab.set_viewport_size(DESK)
    tab.mouse.move(0, 0)
    if tab.locator("#stop").is_visible():
        tab.evaluate("document.querySelector('#stop')?.click()")  # it may have ended meanwhile
        wait_end(tab)
    tab.get_by_role("tab", name="Chat").click()
    if tab.locator("#settings .label-wrap.open").count():
        tab.click("#settings button")
    new_chat(tab)
    tab.fill("#box textarea", "")  # an empty conversation stays, with what is written in its box
    # What is hidden now is drawn over by the next answer: no test may take it for that.
    tab.evaluate(
        """() => {
          document.querySelector('#voice').replaceChildren();
          for (const node of document.querySelectorAll('#tree [data-step]')) {
            delete node.dataset.step;
            delete node.drawn;
          }
        }"""
    )


@contextmanager
def answered(tab, block: str) -> Iterator[None]:
    """Wait until the server has answered what the block with this id is made to ask in `with`. What
    is asked before that may overtake it, and Gradio drops a second click."""
    number = tab.evaluate(
        "id => gradio_config.components.find(c => c.props.elem_id === id).id", block
    )
    asked = f'"trigger_id":{number},'
    with tab.expect_response(lambda found: asked in (found.request.post_data or "")) as reply:
        yield
    reply.value.finished()
    drawn_frames(tab)


def press(tab, button: str) -> None:
    """Click the button with this id, until the server has answered."""
    with answered(tab, button):
        tab.click(f"#{button}")


def new_chat(tab) -> None:
    """Show an empty conversation; where an empty one is shown nothing else tells it."""
    press(tab, "clear")
    tab.wait_for_selector("#examples", state="visible")
    tab.wait_for_function("() => !document.querySelector('#history .message-row')")


def outside(served: Served, asked: list[Any]) -> list[str]:
    """The addresses among those asked for that are not the page's own. What the page's security
    policy stopped was not asked for."""
    own = (served.url, "data:", "blob:")
    return [r.url for r in asked if not r.url.startswith(own) and r.failure != "csp"]


@contextmanager
def opened_on(browser, served: Served, name: str, selector: str) -> Iterator:
    """One page for a module's tests, on the tab of that name once `selector` is there; it asks
    nothing outside this machine, and its scripts do not fail."""
    opened = browser.new_page(viewport=DESK)
    opened.set_default_timeout(SLOW)
    asked, faults = [], []
    opened.on("request", lambda request: asked.append(request))
    opened.on("pageerror", lambda error: faults.append(f"{error} {error.stack}"))
    opened.goto(served.url)
    wait_attached(opened)
    opened.get_by_role("tab", name=name).click()
    opened.wait_for_selector(selector)
    yield opened
    opened.close()
    assert outside(served, asked) == []
    assert faults == [], f"a script of the page failed: {faults}"


def drawn_frames(tab, count: int = 1) -> None:
    """Wait until the browser has drawn so many more frames; what arrives meanwhile is handled."""
    tab.evaluate(
        """n => new Promise(done => {
          const next = () => n-- > 0 ? requestAnimationFrame(next) : done();
          next();
        })""",
        count,
    )


def open_settings(tab) -> None:
    """Until fields are drawn, which Gradio does when they are first seen, and have their values:
    they come a moment later, over what a test typed meanwhile."""
    tab.click("#settings button")
    tab.wait_for_function("document.querySelector('#lock input')?.disabled === true")
    drawn_frames(tab, 2)


def wait_attached(tab) -> None:
    """Wait until the tab shows its conversation. What the browser has stored does not tell it: that
    stays over a reload, and other tabs write it, too."""
    wait_true(tab, script("page", "page.model !== null"))


def wait_true(tab, function: str) -> Any:
    """The first true value of an async function. wait_for_function takes its promise for one, and
    waits for nothing. A page that loads itself again meanwhile has no answer until it is there."""
    from playwright.sync_api import Error

    end, fault = time.monotonic() + SLOW / 1000, None
    while True:
        try:
            if found := tab.evaluate(function):
                return found
        except Error as error:
            if tab.is_closed():
                raise
            fault = error
        assert time.monotonic() < end, f"never true: {function} {fault or ''}"
        tab.wait_for_timeout(20)


def script(module: str, expression: str, given: str = "") -> str:
    """JavaScript for evaluate and wait_true: an expression with what a module of the page
    exports under the module's name. given: the name of its argument."""
    taken = f"const {{ {module} }} = await import('medusa/{module}.js')"
    return f"async ({given}) => {{ {taken}; return {expression}; }}"


SET_PACE = "change => import('medusa/pace.js').then(({ setPace }) => setPace(change))"


def reload(tab) -> None:
    tab.reload()
    wait_attached(tab)


def send(tab, text: str) -> None:
    """Send and wait until the answer runs, or is over already: the demo says hello within less
    time than a busy browser takes to draw Stop."""
    before = tab.locator("#history .user-row").count()
    tab.fill("#box textarea", text)
    tab.click("#send")
    tab.wait_for_function(
        """n => document.querySelector('#stop')?.checkVisibility() ||
          document.querySelectorAll('#history .user-row').length > n""",
        arg=before,
    )


def wait_end(tab) -> None:
    """Wait until the last answer stands in the conversation and none runs: on a busy machine a
    message stands there before Stop does, and its row before its text, for which Gradio may have
    to read the part that draws formulas."""
    tab.wait_for_function(
        """() => {
          const last = [...document.querySelectorAll('#history .message-row')].pop();
          return !document.querySelector('#stop')?.checkVisibility() &&
            document.querySelector('#send')?.checkVisibility() &&
            !last?.matches('.user-row') &&
            last?.querySelector('.message-content')?.innerText.trim() !== '';
        }"""
    )
    drawn_frames(tab, 2)  # what our scripts draw of the same view comes a frame later


def ask(tab, text: str) -> None:
    """Send and wait until the answer stands in the conversation."""
    send(tab, text)
    wait_end(tab)


def last_answer(tab) -> str:
    """Looked up and read at once: a note under it is drawn, and known for one, after its row."""
    return tab.evaluate(
        """() => [...document.querySelectorAll(
            '#history .bot .message-content:not(:has(.answer-note))')]
          .map(node => node.innerText).filter(text => text.trim()).pop() ?? ''"""
    )


def drawn_path(tab) -> list[int]:
    chips = tab.locator('svg.tree [data-state="accepted"]')
    return chips.evaluate_all("all => all.map(e => Number(e.dataset.node))")
