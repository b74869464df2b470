"""The page in a real browser, on a scripted model. No request may leave the machine."""

import re

import pytest
from support.page import drawn_path, last_answer, send, wait_end


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
    assert "timed beside this answer" in tab.inner_text(".tree-block .plain")
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


def test_plain_decoding_is_timed_beside_every_answer(served, open_tab):
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
    monkeypatch.setattr("medusa_chat.ui.chat.audience.GRACE_SECONDS", 0.5)
    one.close()
    two.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 5")
    if served.runner:
        assert served.runner.prompts[-1][-1]["content"] == "second"
    assert "first" not in two.inner_text("#conversation")
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
    tab.locator("#examples").get_by_role("button", name="How do I write a letter?").click()
    tab.wait_for_function("document.querySelector('#live-text .md')?.textContent.length > 5")
    assert tab.text_content(".live-error") == ""
    tab.click("#clear")
    tab.wait_for_selector("#examples")
    assert tab.locator("#history .bot").count() == 0
    wait_end(tab)
