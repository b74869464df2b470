"""How the conversation looks: typed text, formulas, an edit's box, scrolling, the list of keys."""

import pytest
from support.page import ask, last_answer, wait_end

TYPED = "<b>bold</b> *star* <script>alert(1)</script>\n<img src=x>  two   spaces\n# $5 and $6"
FORMULAS = (
    r"First \(a_1\), then $b^2$, then \[c_3\], then $$d_4$$; `$code$` and $5, or $6."
    "\n\n"
    "| x | y |\n|---|---|\n| 1 | 2 |\n"
)
AT_END = "() => { const t = document.querySelector('#conversation');"
AT_END += " return t.scrollHeight - t.scrollTop - t.clientHeight < 4 }"


@pytest.fixture
def quick(served, monkeypatch):
    monkeypatch.setattr(served.runner, "steps", 4)
    monkeypatch.setattr(served.runner, "prefill", 0.02)
    return served.runner


@pytest.fixture
def formulas(quick, monkeypatch):
    monkeypatch.setattr(quick, "pieces", (FORMULAS, *[" "] * 60))
    return quick


def open_edit(tab, row: int) -> None:
    tab.get_by_role("button", name="Edit").nth(row).click()
    tab.locator("#history textarea").wait_for()


def scroll_to_the_top(tab) -> None:
    """By hand, and wait until the wheel has come to rest."""
    tab.mouse.wheel(0, -3000)
    tab.wait_for_function("() => document.querySelector('#conversation').scrollTop === 0")


def test_what_was_typed_stands_as_it_was_typed(quick, open_tab):
    tab = open_tab()
    ask(tab, TYPED)
    shown = tab.locator("#history .user .as-typed")
    assert shown.evaluate("node => node.textContent") == TYPED
    assert tab.locator("#history .user :is(b, em, h1, script, .katex):visible").count() == 0
    open_edit(tab, 0)
    assert tab.locator("#history textarea").input_value() == TYPED
    tab.reload()
    shown.wait_for()
    assert shown.evaluate("node => node.textContent") == TYPED


def test_formulas_and_tables_are_drawn_and_prices_are_not(formulas, open_tab):
    tab = open_tab()
    ask(tab, "formulas")
    tab.wait_for_function("() => document.querySelectorAll('#history .bot .katex').length === 4")
    assert tab.locator("#history .bot .katex-display").count() == 2
    assert tab.locator("#history .bot td").all_inner_texts() == ["1", "2"]
    answer = last_answer(tab)
    assert "$5, or $6" in answer and "$code$" in answer


def test_an_edit_has_the_width_of_the_conversation_and_the_height_of_its_text(quick, open_tab):
    tab = open_tab()
    ask(tab, "\n".join(f"line {n}" for n in range(14)))
    open_edit(tab, 0)
    box = tab.locator("#history textarea").bounding_box()
    conversation = tab.locator("#conversation").bounding_box()
    assert box["width"] > 0.85 * conversation["width"]
    fits = "node => node.scrollHeight <= node.clientHeight + 2"
    assert box["height"] > 250 and tab.locator("#history textarea").evaluate(fits)


def test_a_new_turn_is_shown_and_whoever_scrolled_up_stays_there(quick, open_tab):
    tab = open_tab()
    long = "\n".join(f"line {n}" for n in range(20))
    for n in range(4):
        ask(tab, f"{n} {long}")
        tab.wait_for_function(AT_END)
    jump = tab.locator(".jump-to-end")
    assert jump.is_hidden()
    tab.locator("#conversation").hover()
    scroll_to_the_top(tab)
    jump.wait_for()
    edited = tab.evaluate("() => document.querySelector('#conversation').scrollTop")
    tab.evaluate("() => document.querySelector('#live-text').style.setProperty('height', '50px')")
    tab.wait_for_function("() => document.querySelector('#live-text').offsetHeight === 50")
    assert tab.evaluate("() => document.querySelector('#conversation').scrollTop") == edited
    jump.click()
    tab.wait_for_function(AT_END)
    jump.wait_for(state="hidden")
    scroll_to_the_top(tab)
    jump.wait_for()
    ask(tab, "again")  # sending shows the new turn, wherever one was
    tab.wait_for_function(AT_END)
    wait_end(tab)


def test_the_list_of_keys_has_a_button_on_every_tab(quick, open_tab):
    tab = open_tab()
    for name in ("Chat", "Tune"):
        tab.get_by_role("tab", name=name).click()
        tab.get_by_role("button", name="Keyboard: what each key does").click()
        tab.locator("#shortcuts").wait_for()
        assert "new chat" in tab.locator("#shortcuts").inner_text()
        tab.locator("#shortcuts").get_by_role("button", name="Close").click()
        tab.locator("#shortcuts").wait_for(state="hidden")
