"""The page in a real browser, on a scripted model. No request may leave the machine."""

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from scripted import ScriptedRunner

from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session

CHROMIUM = shutil.which("chromium")


def _browser_or_skip() -> None:
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
    """A page that is open. runner: None when a real model answers."""

    url: str
    session: Session
    runner: ScriptedRunner | None


def scripted_session() -> Session:
    """A session that answers at once; a real one goes into the fixture's params beside it."""
    session = Session(ScriptedRunner(delay=0.03, prefill=0.15, steps=50, nodes=16))
    session.submit_load(LoadRequest())
    return session


@pytest.fixture(scope="module", params=[scripted_session])
def served(request) -> Iterator[Served]:
    _browser_or_skip()
    from medusa_chat.ui.app import PageOptions, open_page

    session = request.param()
    page = open_page(session, PageOptions(trees=("chain",)))
    runner = session.runner if isinstance(session.runner, ScriptedRunner) else None
    yield Served(page.url, session, runner)
    page.close()
    session.close()


@pytest.fixture(scope="module")
def browser(served) -> Iterator:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        chrome = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chrome
        chrome.close()


@pytest.fixture
def open_tab(served, browser) -> Iterator:
    """Opens tabs in which every outside address is blocked, recorded and a failure. person: tabs
    of one number share a browser, its storage and so its conversation."""
    contexts, outside, faults = {}, [], []
    local = re.compile(rf"^({re.escape(served.url)}|data:|blob:)")

    def context_of(person):
        if person not in contexts:
            contexts[person] = browser.new_context(viewport={"width": 1280, "height": 900})
            contexts[person].set_default_timeout(60_000)
            contexts[person].route("**/*", gate)
        return contexts[person]

    def gate(route):
        if local.match(route.request.url):
            route.continue_()
        else:
            outside.append(route.request.url)
            route.abort()

    def opened(person=0):
        tab = context_of(person).new_page()
        tab.on("pageerror", lambda error: faults.append(str(error)))
        tab.goto(served.url)
        tab.wait_for_selector('.status-line[data-status="ready"]')
        wait_attached(tab)
        return tab

    yield opened
    for context in contexts.values():
        context.close()
    assert outside == [], "the page asked for something outside this machine"
    assert faults == [], "a script of the page failed"


def wait_attached(tab) -> None:
    """Wait until the tab shows its room: the server's token is in the browser's storage."""
    tab.wait_for_function("localStorage.getItem('medusa-chat') !== null")


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
    tab.wait_for_selector("#stop", state="hidden")
    tab.wait_for_selector("#send", state="visible")


def last_answer(tab) -> str:
    return tab.locator("#history .bot .message-content").last.inner_text()


def drawn_path(tab) -> list[int]:
    chips = tab.locator('svg.tree [data-state="accepted"]')
    return chips.evaluate_all("all => all.map(e => Number(e.dataset.node))")


def test_an_answer_streams_and_its_tree_is_the_traces(served, open_tab, monkeypatch):
    if served.runner:
        monkeypatch.setattr(served.runner, "hold_at", 10)
    tab = open_tab()
    assert "tree" in tab.inner_text("#status")
    send(tab, "Why are you fast?")
    tab.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 20")
    first = tab.text_content("#live-text .md")
    if served.runner:
        served.runner.hold_at = 30
    tab.wait_for_function(
        "n => document.querySelector('#live-text .md')?.textContent.length > n", arg=len(first)
    )
    if served.runner:
        served.runner.hold_at = None
    wait_end(tab)
    assert "Why are you fast?" in tab.inner_text("#history .user")
    assert tab.text_content("#live-text .md") == ""
    assert tab.input_value("#box textarea") == ""
    assert "not measured yet" in tab.inner_text(".tree-block .plain")
    if served.runner:
        assert last_answer(tab).startswith("Medusa adds a few small heads")
        last = served.runner.last[-1]
        tab.wait_for_selector(f'svg.tree[data-step="{last.index}"]')
        assert drawn_path(tab) == list(last.path)
        assert tab.locator("svg.tree .chip").count() == len(last.draft.tokens)
        shown = tab.locator("svg.tree .chip .token").first.text_content()
        assert shown == last.draft.texts[0].replace(" ", "·").replace("\n", "⏎")


def test_a_click_on_a_bar_shows_that_step(served, open_tab):
    if not served.runner:
        pytest.skip("needs the script's own trace")
    tab = open_tab()
    send(tab, "hello")
    wait_end(tab)
    step = next(s for s in served.runner.last[5:] if len(s.path) > 2)
    tab.locator(f'.bars [data-step="{step.index}"]').click()
    tab.wait_for_selector(f'svg.tree[data-step="{step.index}"]')
    assert drawn_path(tab) == list(step.path)
    tab.click(".playbar .back")
    tab.wait_for_selector(f'svg.tree[data-step="{served.runner.last[-1].index}"]')


def test_stop_ends_early_and_keeps_the_text(served, open_tab, monkeypatch):
    if served.runner:
        monkeypatch.setattr(served.runner, "hold_at", 20)
    tab = open_tab()
    send(tab, "Tell me a story about a fox")
    tab.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 20")
    tab.click("#stop")
    wait_end(tab)
    assert "stopped" in tab.inner_text("#history")
    assert len(last_answer(tab)) > 0
    if served.runner:
        assert 0 < len(served.runner.last) < 50
        assert tab.inner_text("#history").count("Medusa adds") >= 1


def test_vanilla_measures_the_plain_speed(served, open_tab):
    tab = open_tab()
    tab.check("#vanilla input")
    send(tab, "What is the capital of Spain?")
    wait_end(tab)
    assert tab.locator("svg.tree .chip").count() == 1
    assert tab.locator("[data-figure='vs plain'] .value").inner_text() == "plain"
    tab.uncheck("#vanilla input")
    send(tab, "and now with Medusa")
    wait_end(tab)
    assert re.search(r"plain: [\d.]+ tokens/s", tab.inner_text(".tree-block .plain"))
    assert re.fullmatch(r"[\d.]+×", tab.locator("[data-figure='vs plain'] .value").inner_text())


def test_another_person_waits_sees_the_place_and_gets_the_model_when_the_first_is_gone(
    served, open_tab, monkeypatch
):
    if served.runner:
        monkeypatch.setattr(served.runner, "hold_at", 10)  # it ends when it is stopped
    one, two = open_tab(person=1), open_tab(person=2)
    send(one, "first")
    one.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 5")
    send(two, "second")
    two.wait_for_function(
        "document.querySelector('.live-status')?.textContent.includes('waiting: 1 ahead')"
    )
    monkeypatch.setattr("medusa_chat.ui.chat.chat_session.GRACE_SECONDS", 0.5)
    one.close()
    two.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 5")
    if served.runner:
        assert served.runner.prompts[-1][-1]["content"] == "second"
    assert "first" not in two.inner_text("#talk")
    monkeypatch.undo()
    two.click("#stop")
    wait_end(two)


def test_what_a_model_writes_is_text_and_never_runs(served, open_tab, monkeypatch):
    if not served.runner:
        pytest.skip("needs a script that writes such text")
    hostile = (
        "<img src=q onerror=window.hit=1>",
        "${window.hit=1}",
        "{{window.hit=1}}",
        "<script>window.hit=1</script>",
        "![x](https://example.com/beacon.png)",
        "<div style='position:fixed;inset:0'>over</div>",
    )
    monkeypatch.setattr(served.runner, "pieces", hostile)
    monkeypatch.setattr(served.runner, "steps", 10)
    tab = open_tab()
    send(tab, "".join(hostile))
    wait_end(tab)
    tab.wait_for_selector("svg.tree .chip")
    assert tab.evaluate("window.hit") is None
    assert tab.locator("#send").click(trial=True) is None  # nothing lies over the page


def test_nothing_to_send_is_one_clear_line(open_tab):
    tab = open_tab()
    tab.fill("#box textarea", "   ")
    tab.click("#send")
    tab.wait_for_function(
        "document.querySelector('.live-error')?.textContent.includes('message is empty')"
    )
    tab.get_by_role("button", name="Why are you fast?").click()
    tab.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 5")
    assert tab.text_content(".live-error") == ""
    tab.click("#clear")
    tab.wait_for_selector("#examples")
    assert tab.locator("#history .bot").count() == 0
    wait_end(tab)
