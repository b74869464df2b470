"""The Tune tab in a real browser, on a scripted model: pictures, a training, its edges."""

from collections.abc import Iterator

import pytest
from support import scripted
from support.access import findings
from support.page import Served, ask, drawn_frames, opened_on, page_of
from support.training_events import step

from medusa_chat.messages import LoadRequest
from medusa_chat.paths import DATA_DIR_VARIABLE
from medusa_chat.runtime.history import History
from medusa_chat.runtime.session import Session
from medusa_chat.training.events import RunLog

NODES = 9


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tune")
    session = Session(scripted.ScriptedRunner(delay=0.002, prefill=0, steps=30, nodes=NODES))
    with page_of(session, history=History(folder / "chats.sqlite3")) as page:
        yield page


@pytest.fixture(scope="module")
def tab(served, browser) -> Iterator:
    with opened_on(browser, served, "Tune", ".roof-block svg.plot .best") as opened:
        yield opened


def says(tab, selector: str, text: str) -> None:
    tab.wait_for_function(
        "([at, text]) => document.querySelector(at)?.textContent.includes(text)",
        arg=[selector, text],
    )


def test_without_a_model_it_says_so_and_the_hardware_model_is_there(tab):
    says(tab, ".tune-hollow", "No model is loaded")
    tab.wait_for_selector(".roof-block .roof-pair:not([hidden]) svg.plot")
    assert tab.locator(".heat").count() == 0
    assert findings(tab) == []


def test_the_loaded_models_heads_and_tree_are_drawn(served, tab):
    served.session.submit(LoadRequest())
    tab.wait_for_selector(".heat tbody tr")
    assert tab.locator(".heat tbody tr").count() == 4
    assert tab.locator(".heat td.tinted").first.inner_text() == "62%"
    assert tab.locator("svg.shape .chip").count() == NODES
    says(tab, ".tune-verdict", "No step's cost is known yet.")
    tab.get_by_role("button", name="Mask").focus()
    tab.keyboard.press("Enter")
    tab.wait_for_selector(".tune-block svg.mask")
    assert tab.locator(".tune-block svg.mask .row").count() == NODES


def test_an_answer_teaches_costs_and_the_best_point(tab):
    tab.get_by_role("tab", name="Chat").click()
    ask(tab, "hello")
    tab.get_by_role("tab", name="Tune").click()
    says(tab, ".tune-verdict", "times plain decoding")
    says(tab, ".tune-block", "learnt from 40 steps")
    tab.wait_for_selector(".tune-block .plot .best")
    assert tab.locator(".tune-block .plot .best").count() == 1


def test_another_gpu_changes_the_modelled_best(tab):
    before = tab.inner_text(".roof-block .tune-strong")
    tab.locator("#roof-card").get_by_label("GPU", exact=True).click()
    tab.get_by_role("option", name="RTX 4090").click()
    says(tab, ".roof-block", "RTX 4090")
    assert tab.inner_text(".roof-block .tune-strong") != before


def test_a_training_is_watched_and_stopped(tab, tmp_path, monkeypatch):
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(tmp_path))
    with RunLog(tmp_path / "mine") as log:
        for number in range(1, 60):
            log.tell(step(number))
        says(tab, ".train-block", "Step 59 of 300, loss 3.803.")
        assert tab.locator(".train-block svg.plot[role=img] .line").count() == 3
        assert findings(tab) == [], "training"
        tab.click(".train-block .halt")
        while not log.wants_stop():
            drawn_frames(tab)
        log.stopped()
    says(tab, ".train-block", "Stopped. The same command with --resume continues it.")


def test_it_fits_a_phone_and_is_accessible_in_the_dark(tab):
    tab.set_viewport_size({"width": 390, "height": 844})
    tab.wait_for_function("document.querySelector('.tune-block svg.plot')?.clientWidth < 370")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert findings(tab) == [], "light"
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_function("getComputedStyle(document.body).backgroundColor === 'rgb(13, 19, 17)'")
    assert findings(tab) == [], "dark"
