"""An answer saved as a file replays without a server; another token of a step is gone on from."""

from pathlib import Path

from support.page import DESK, ask, wait_end

FIGURES = "[...document.querySelectorAll('.tile .value')].map(tile => tile.textContent)"
TREE = "[...document.querySelectorAll('svg.tree .chip')].map(e => e.dataset.node + e.dataset.state)"


def to_step(tab, step: int) -> None:
    tab.locator("svg.bars").press("Home")
    for _ in range(step):
        tab.locator("svg.bars").press("ArrowRight")
    tab.wait_for_selector(f'svg.tree[data-step="{step}"]')


def saved(tab, folder: Path) -> Path:
    with tab.expect_download() as found:
        tab.locator("#history .save-answer").first.click()
    file = folder / found.value.suggested_filename
    found.value.save_as(file)
    return file


def test_a_saved_answer_replays_from_a_file_as_the_page_does(open_tab, browser, quick, tmp_path):
    tab = open_tab(is_new=True)
    ask(tab, "hello <b>you</b>")
    tab.locator("#history .answer-strip").first.click()
    to_step(tab, 2)
    shown = tab.evaluate(FIGURES), tab.evaluate(TREE)
    file = saved(tab, tmp_path)
    assert file.suffix == ".html"
    asked, faults = [], []
    page = browser.new_page(viewport=DESK)
    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.goto(file.as_uri())
    page.wait_for_selector("svg.tree")
    to_step(page, 2)
    assert (page.evaluate(FIGURES), page.evaluate(TREE)) == shown
    assert page.inner_text(".question") == "hello <b>you</b>"
    text = "".join(quick.last[2].text.split())
    assert "".join(page.inner_text(".answer .now").split()) == text
    page.locator(".answer [data-step='1']").click()
    page.wait_for_selector('svg.tree[data-step="1"]')
    assert [url for url in asked if not url.startswith(("data:", "file:"))] == []
    assert faults == []
    page.close()


def test_the_step_is_saved_as_a_picture(open_tab, quick, tmp_path):
    tab = open_tab(is_new=True)
    ask(tab, "hello")
    tab.wait_for_selector("svg.tree")
    with tab.expect_download() as found:
        tab.click("#tree .png")
    found.value.save_as(tmp_path / "step.png")
    head = (tmp_path / "step.png").read_bytes()[:24]
    wide = tab.evaluate("document.querySelector('svg.tree').width.baseVal.value")
    assert head.startswith(b"\x89PNG")
    assert int.from_bytes(head[16:20], "big") == round(2 * (wide + 24))


def test_another_token_of_a_step_is_gone_on_from(open_tab, quick):
    tab = open_tab(is_new=True)
    ask(tab, "hello")
    tab.locator("#history .answer-strip").first.click()
    to_step(tab, 1)
    step = quick.last[1]
    assert step.draft is not None
    up = step.draft.parents
    node = next(n for n in range(1, len(up)) if up[n] in step.path and n not in step.path)
    tab.locator(f'svg.tree [data-node="{node}"]').click()
    tab.get_by_role("button", name="Continue from this token instead").click()
    tab.wait_for_selector("#history .versions")
    wait_end(tab)
    assert tab.inner_text("#history .versions span") == "2/2"
    asked = quick.prompts[-1]
    assert asked.ids[-1] == step.draft.tokens[node]
    tab.wait_for_selector("svg.tree")
    assert tab.locator("svg.bars").get_attribute("aria-valuemax") == str(quick.steps)
