"""The Models tab in a real browser: a local Hub, the real client, a real model in its process."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from support.access import findings
from support.checkpoints import layout_a_pt, write_checkpoint
from support.hub_files import use
from support.hub_server import Fault, HubRepo, read_folder, serving
from support.page import Served, ask, open_settings, opened_on, page_of
from support.waiting import wait_for

from medusa_chat.messages import LoadRequest
from medusa_chat.paths import DATA_DIR_VARIABLE
from medusa_chat.runtime.runner import WorkerProcess
from medusa_chat.runtime.session import Session

README = b"---\nlicense: apache-2.0\n---\nabout"
WHOLE, HEADS, GATED = "someone/tiny-medusa", "someone/medusa-heads", "someone/gated-medusa"


@pytest.fixture(scope="module")
def hub_of(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A Hub with a whole checkpoint, heads with their base, a gated repo and a false friend; this
    process and those it starts speak to it."""
    folder = tmp_path_factory.mktemp("hub")
    whole = write_checkpoint(folder / "whole")
    base = write_checkpoint(folder / "base", heads=0)
    layout_a_pt(folder / "heads", base)
    config = {"base_model_name_or_path": "someone/base", "medusa_num_heads": 3}
    (folder / "heads" / "config.json").write_text(json.dumps(config), "utf-8")
    large = {"spiece.model": bytes(200_000)}  # fetched, and never looked into
    repos = {
        WHOLE: HubRepo(read_folder(whole) | {"README.md": README} | large, downloads=1234),
        HEADS: HubRepo(read_folder(folder / "heads"), downloads=77),
        GATED: HubRepo(read_folder(whole), gated="auto", downloads=5),
        "someone/base": HubRepo(read_folder(base)),
        "someone/medusa-merge": HubRepo(read_folder(base), downloads=99),
    }
    patch = pytest.MonkeyPatch()
    with serving(repos) as running:
        use(running, patch, folder)
        patch.setenv("HF_ENDPOINT", running.url)
        patch.setenv("HF_HOME", str(folder))
        patch.setenv("HF_HUB_CACHE", str(folder / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "0")
        patch.setenv(DATA_DIR_VARIABLE, str(folder / "data"))
        yield SimpleNamespace(server=running, start=str(whole))
    patch.undo()


@pytest.fixture(scope="module")
def served(hub_of) -> Iterator[Served]:
    session = Session(WorkerProcess())
    session.submit(LoadRequest(hub_of.start, precision="fp32"))
    with page_of(session) as page:
        wait_for(lambda: session.state.status == "ready")
        yield page


@pytest.fixture(scope="module")
def tab(served, browser) -> Iterator:
    with opened_on(browser, served, "Models", ".model") as opened:
        yield opened


def row(name: str, part: str = "") -> str:
    return f'.model[data-id="{name}"] {part}'.strip()


def stage(tab, name: str) -> str:
    """The card's text once the load is there."""
    tab.wait_for_selector(f'.pick-card[data-stage="{name}"]')
    return tab.inner_text(".pick-card")


def test_the_presets_are_there_with_their_figures_before_anything_is_found(tab):
    preset = "FasterDecoding/medusa-vicuna-7b-v1.3"
    text = " ".join(tab.inner_text(row(preset)).split())
    for said in (
        "lmsys/vicuna-7b-v1.3",
        "Llama 1, not commercial",
        "15 GB to download",
    ):
        assert said in text
    assert tab.locator(row(preset, ".fit")).count() >= 3
    tab.wait_for_selector(row(preset, '.fit[data-fit]:not([data-fit=""])'))
    words = tab.locator(row(preset, ".fit i")).all_inner_texts()
    assert words and all(re.fullmatch("✓ fits|≈ tight|✗ too large", word) for word in words)


def test_the_hub_is_searched_by_files_and_each_find_has_its_figures(tab):
    tab.wait_for_selector(row(WHOLE, '[data-fact="licence"]'))
    text = tab.inner_text(row(WHOLE))
    assert "apache-2.0" in text and "1,234" in text and "kB to download" in text
    tab.wait_for_selector(row(HEADS, '[data-fact="heads"]'))
    assert "someone/base" in tab.inner_text(row(HEADS))
    assert tab.locator(row("someone/medusa-merge")).count() == 0
    tab.wait_for_selector(row(GATED, ".model-problem"))
    assert "accept its licence" in tab.inner_text(row(GATED))
    tab.fill("#models-text input, #models-text textarea", "gated")
    tab.wait_for_selector(row(WHOLE), state="detached")
    tab.wait_for_selector(row(GATED))
    assert tab.locator(".model").count() == 1


@pytest.mark.parametrize(
    "name, said",
    [
        ("someone/nothing-here", "someone/nothing-here is not on the Hub"),
        (GATED, "is a gated repository"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_the_model_stays(tab, served, name, said):
    tab.fill("#models-text input, #models-text textarea", name)
    tab.click(row(name, ".load"))
    tab.wait_for_function(
        "said => document.querySelector('.pick-text')?.textContent.includes(said)", arg=said
    )
    assert said in stage(tab, "failed")
    assert served.session.state.status == "ready"
    tab.click(".pick-halt")
    tab.wait_for_selector(".pick-card", state="hidden")


def test_a_download_tells_its_bytes_and_a_cancel_keeps_what_came(tab, served, hub_of):
    hub_of.server.faults.append(Fault(f"cdn/{WHOLE}/.*spiece", "slow", rate=8_000))
    tab.fill("#models-text input, #models-text textarea", WHOLE)
    tab.click(row(WHOLE, ".load"))
    tab.wait_for_function(
        "/ of .*B\\/s.* left/.test(document.querySelector('.pick-figures')?.textContent)"
    )
    assert served.session.state.status == "ready", "the model goes on answering"
    assert findings(tab) == [], "downloading"
    tab.click(".pick-halt")
    assert "kept" in stage(tab, "stopped")
    hub_of.server.faults.clear()


def test_a_checkpoint_of_the_hub_is_loaded_and_the_conversation_goes_on(tab, served):
    tab.get_by_role("tab", name="Chat").click()
    open_settings(tab)
    tab.get_by_label("Max new tokens").first.fill("8")  # a tiny model has little chat
    tab.get_by_label("Max new tokens").first.blur()
    ask(tab, "hello")
    tab.get_by_role("tab", name="Models").click()
    tab.fill("#models-text input, #models-text textarea", WHOLE)
    tab.click(row(WHOLE, ".load"))
    assert f"{WHOLE} is loaded" in stage(tab, "done")
    tab.wait_for_selector(row(WHOLE, ".model-loaded"))
    tab.wait_for_function(
        "/memory .*weights/.test(document.querySelector('.pick-loaded')?.textContent)"
    )
    tab.wait_for_function(
        "name => document.querySelector('#status')?.textContent.includes(name)", arg=WHOLE
    )
    assert tab.locator(row(WHOLE, ".delete")).count() == 0, "it is in use"
    assert findings(tab) == [], "loaded"
    tab.get_by_role("tab", name="Chat").click()
    ask(tab, "and again")
    said = tab.inner_text("#history")
    assert "hello" in said and "and again" in said
    assert served.session.state.model.name == WHOLE
    tab.get_by_role("tab", name="Models").click()


def test_deleting_asks_first_and_frees_the_disk(tab, served):
    tab.fill("#models-text input, #models-text textarea", "demo")
    tab.click(row("demo", ".load"))
    tab.wait_for_selector(row("demo", ".model-loaded"))
    tab.fill("#models-text input, #models-text textarea", WHOLE)
    tab.click(row(WHOLE, ".delete"))
    assert "kB" in tab.inner_text(row(WHOLE, ".model-question"))
    tab.keyboard.press("Escape")
    tab.wait_for_selector(row(WHOLE, ".model-question"), state="detached")
    tab.click(row(WHOLE, ".delete"))
    tab.click(row(WHOLE, ".yes"))
    tab.wait_for_selector(row(WHOLE, ".delete"), state="detached")
    tab.wait_for_function(
        "id => document.querySelector(`[data-id='${id}'] .model-download`)"
        ".textContent.includes('to download')",
        arg=WHOLE,
    )


def test_the_tab_is_accessible_and_fits_a_phone(tab):
    tab.fill("#models-text input, #models-text textarea", "")
    tab.wait_for_selector(row(GATED, ".model-problem"))
    assert findings(tab) == [], "light"
    tab.set_viewport_size({"width": 390, "height": 844})
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    tab.emulate_media(color_scheme="dark")
    tab.wait_for_selector("body.dark")
    assert findings(tab) == [], "dark"
    tab.emulate_media(color_scheme="light")
