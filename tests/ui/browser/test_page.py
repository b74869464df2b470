"""The page in a real browser, on a scripted model. No request may leave the machine."""

import re

import pytest
from playwright.sync_api import TimeoutError
from support.page import (
    ask,
    drawn_frames,
    drawn_path,
    keep_no_settings,
    last_answer,
    new_chat,
    open_settings,
    reload,
    send,
    wait_end,
)


def test_an_answer_streams_and_its_tree_is_the_traces(served, open_tab, monkeypatch):
    if served.runner:
        monkeypatch.setattr(served.runner, "hold_at", 10)
    tab = open_tab()
    assert "CPU" in tab.inner_text("#status")
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
    assert "timed right after this answer" in tab.text_content(".tree-block .measured")
    if served.runner:
        assert last_answer(tab).startswith("Medusa adds a few small heads")
        last = served.runner.last[-1]
        tab.wait_for_selector(f'svg.tree[data-step="{last.index}"]')
        assert drawn_path(tab) == list(last.path)
        assert tab.locator("svg.tree .chip").count() == len(last.draft.tokens)
        shown = tab.locator("svg.tree .chip .token").first.text_content()
        assert shown == last.draft.texts[0].replace(" ", "·").replace("\n", "⏎")


def test_a_click_on_a_bar_shows_that_step(served, open_tab, monkeypatch):
    if not served.runner:
        pytest.skip("needs the script's own trace")
    monkeypatch.setattr(served.runner, "steps", 20)
    tab = open_tab()
    ask(tab, "hello")
    step = next(s for s in served.runner.last[5:] if len(s.path) > 2)
    tab.locator(f'.bars [data-step="{step.index}"]').click()
    tab.wait_for_selector(f'svg.tree[data-step="{step.index}"]')
    assert drawn_path(tab) == list(step.path)
    tab.click(".timeline .back")
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


def test_plain_decoding_is_timed_beside_every_answer(served, open_tab, monkeypatch):
    if served.runner:
        monkeypatch.setattr(served.runner, "steps", 15)
    tab = open_tab()
    tab.check("#vanilla input")
    ask(tab, "What is the capital of Spain?")
    assert tab.locator("svg.tree .chip").count() == 1
    assert tab.locator("[data-figure='times plain'] .value").inner_text() == "–"
    tab.uncheck("#vanilla input")
    ask(tab, "and now with Medusa")
    assert re.search(r"Plain decoding: [\d.]+ tokens/s", tab.text_content(".tree-block .measured"))
    assert re.fullmatch(r"[\d.]+×", tab.locator("[data-figure='times plain'] .value").inner_text())
    keep_no_settings(tab)


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
    monkeypatch.setattr("medusa_chat.ui.chat.answer_run.HIDDEN_SECONDS", 0.5)
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
        "![x](/logout)<video src=/logout></video><b style='background:url(/logout)'>b</b>",
        "<div style='position:fixed;inset:0'>over</div>",
    )
    monkeypatch.setattr(served.runner, "pieces", hostile)
    monkeypatch.setattr(served.runner, "steps", 10)
    tab, asked = open_tab(), []
    tab.on("request", lambda request: asked.append(request))
    ask(tab, "".join(hostile))
    tab.wait_for_selector("svg.tree .chip")
    assert tab.locator("#conversation .md :is(div[style], b, video, [src=q])").count() == 0
    assert "<div style='position:fixed;inset:0'>over</div>" in last_answer(tab)
    drawn_frames(tab, 2)
    assert [r.url for r in asked if "logout" in r.url and r.failure != "csp"] == []
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
    new_chat(tab)
    wait_end(tab)


# ---- how the conversation looks: typed text, formulas, an edit's box, scrolling, the keys ----

TYPED = "<b>bold</b> *star* <script>alert(1)</script>\n<img src=x>  two   spaces\n# $5 and $6"
FORMULAS = (
    r"First \(a_1\), then $b^2$\(z\)$x<y$, then \[c_3\], then $$d_4$$; `$code$` and $5, or $6."
    "\n\n"
    "| x | y |\n|---|---|\n| 1 | 2 |\n"
)
ALIGNED = "- a\n  - b\n    - c\n\n| x | y | z |\n|---|--:|:-:|\n| 1 | 2 | 3 |\n\n"
# A model's words that a browser would take for HTML; in a block of code they keep its colours.
HTML = """<form action="/x" id="box"><button id="stop">Go</button></form>

<!-- a remark --> a<b and &lt;b&gt; and &amp;, `<i>` and <b>*not* bold</b>, \\(x<y\\)
<style>body { display: none }</style> <https://a.example/?b=1&lt=2>

- <u>one</u> [to](https://a.example/?b=1&c=2) [and](https://a.example/?b=1&amp;c=3)

| <s>x</s> |
|---|
| <i>1</i> |
"""
PAGE = "```html\n<p id='p'>&lt;</p>\n```\n"
DIAGRAM = "```mermaid\ngraph TD\nA[\"<form id='box'><button>Go</button></form>\"] --> B\n```\n"
NO_MARKS = "() => !document.querySelector('#conversation').textContent.includes('\\ufeff')"
AT_END = "() => { const t = document.querySelector('#conversation');"
AT_END += " return t.scrollHeight - t.scrollTop - t.clientHeight < 4 }"


@pytest.fixture
def formulas(quick):
    quick.pieces = (FORMULAS, *[" "] * 60)
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
    reload(tab)
    shown.wait_for()
    assert shown.evaluate("node => node.textContent") == TYPED


def test_formulas_and_tables_are_drawn_and_copied_as_written_and_prices_are_not(formulas, open_tab):
    tab = open_tab()
    tab.add_init_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    reload(tab)
    ask(tab, "formulas")
    tab.wait_for_function("() => document.querySelectorAll('#history .bot .katex').length === 6")
    assert tab.locator("#history .bot .katex-display").count() == 2
    assert tab.locator("#history .bot td").all_inner_texts() == ["1", "2"]
    answer = last_answer(tab)
    assert "$5, or $6" in answer and "$code$" in answer
    for _ in range(2):
        tab.get_by_role("button", name="Copy message").last.click()
        tab.wait_for_function("text => window.copied?.trimEnd() === text", arg=FORMULAS.rstrip())
        tab.get_by_role("button", name="Edit").last.click()
        box = tab.locator("#history textarea")
        assert box.input_value().rstrip() == FORMULAS.rstrip()
        tab.keyboard.press("Escape")
        box.wait_for(state="detached")
        reload(tab)


def test_columns_stand_as_they_were_aligned_and_inner_lists_are_not_smaller(
    quick, open_tab, monkeypatch
):
    monkeypatch.setattr(quick, "pieces", (ALIGNED, *[" "] * 60))
    tab = open_tab()
    ask(tab, "table")
    tab.wait_for_selector("#history .bot td")
    style = "(all, name) => all.map(node => getComputedStyle(node)[name])"
    for cells in ("th", "td"):
        found = tab.locator(f"#history .bot {cells}").evaluate_all(style, "textAlign")
        assert found[0] in ("start", "left") and found[1:] == ["right", "center"]
    sizes = tab.locator("#history .bot li").evaluate_all(style, "fontSize")
    assert sizes == ["15px"] * 3


def test_a_long_message_is_folded_until_it_is_asked_for(quick, open_tab):
    tab = open_tab()
    ask(tab, "short")
    assert tab.locator(".typed-more:visible").count() == 0
    long = "\n".join(f"line {n}" for n in range(60))
    ask(tab, long)
    shown, more = tab.locator("#history .as-typed").last, tab.locator(".typed-more").last
    assert shown.text_content() == long
    folded = shown.bounding_box()["height"]
    assert folded < 300 and more.get_attribute("aria-expanded") == "false"
    more.press("Enter")
    tab.get_by_role("button", name="Show less").wait_for()
    drawn_frames(tab, 3)
    assert shown.bounding_box()["height"] > 1000
    assert tab.evaluate(AT_END) is False  # its beginning is read next
    ask(tab, "another")
    tab.get_by_role("button", name="Show less").click()
    tab.get_by_role("button", name="Show more").wait_for()
    assert tab.locator("#history .as-typed").nth(1).bounding_box()["height"] == folded


def test_what_is_printed_is_the_whole_conversation_and_nothing_else(quick, open_tab):
    tab = open_tab()
    tab.emulate_media(color_scheme="dark")
    ask(tab, "\n".join(f"line {n}" for n in range(60)))
    assert tab.evaluate("document.body.matches('.dark')")
    tab.emulate_media(media="print", color_scheme="dark")
    tab.wait_for_function("() => !document.body.matches('.dark')")
    for part in ("#header", "#composer", "#settings", "#right", ".message-buttons", ".typed-more"):
        assert tab.locator(part).first.is_hidden(), part
    box = tab.locator("#conversation").bounding_box()
    last = tab.locator("#history .message-row").last.bounding_box()
    assert last["y"] + last["height"] <= box["y"] + box["height"] and box["height"] > 1200
    assert tab.evaluate("document.documentElement.scrollHeight") >= box["height"]
    tab.emulate_media(media="screen", color_scheme="light")
    tab.locator("#composer").wait_for()


def test_html_of_a_model_is_text(quick, open_tab, monkeypatch):
    tab = open_tab()
    tab.add_init_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    reload(tab)
    for text in (HTML, PAGE):
        monkeypatch.setattr(quick, "pieces", (text, *[" "] * 60))
        monkeypatch.setattr(quick, "hold_at", 2)
        send(tab, "<form id='mine'>")
        tab.wait_for_function("() => document.querySelector('#live-text .md')?.textContent.trim()")
        drawn_frames(tab, 5)
        is_html = "#conversation .md :is(form, button:not([title=copy]), style, b, u, s, i, [id])"
        for _ in range(2):
            assert tab.locator(is_html).count() == 0 and tab.evaluate(NO_MARKS)
            quick.hold_at = None
            wait_end(tab)
        tab.get_by_role("button", name="Copy message").last.click()
        tab.wait_for_function("text => window.copied?.trimEnd() === text", arg=text.rstrip())
        tab.get_by_role("button", name="Edit").last.click()
        assert tab.locator("#history textarea").input_value().rstrip() == text.rstrip()
        tab.keyboard.press("Escape")
    answer = tab.locator("#history .bot .message-content").first
    shown = answer.inner_text()
    assert HTML.splitlines()[0] in shown
    assert "<!-- a remark --> a<b and &lt;b&gt; and &amp;, <i> and <b>not bold</b>" in shown
    assert answer.locator("code").inner_text() == "<i>" and answer.locator(".katex").count() == 1
    assert answer.locator("a").evaluate_all("all => all.map(a => a.getAttribute('href'))") == [
        "https://a.example/?b=1&lt=2",
        "https://a.example/?b=1&c=2",
        "https://a.example/?b=1&c=3",
    ]
    assert answer.locator("td").inner_text() == "<i>1</i>"
    assert tab.locator("#history code .token.tag").count() > 0
    assert tab.locator("#history pre code").inner_text().strip() == "<p id='p'>&lt;</p>"


def test_html_in_a_diagram_is_text(quick, open_tab, monkeypatch):
    monkeypatch.setattr(quick, "pieces", (DIAGRAM, *[" "] * 60))
    tab = open_tab()
    ask(tab, "draw")
    tab.locator("#history .mermaid svg", has_text="<form id").wait_for()
    assert tab.locator("#history .mermaid :is(form, button, [id=box])").count() == 0


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
        tab.get_by_role("button", name="The picture and the keyboard").click()
        tab.locator("#shortcuts").wait_for()
        told = tab.locator("#shortcuts").inner_text()
        assert "new chat" in told and "tested and rejected" in told
        tab.locator("#shortcuts").get_by_role("button", name="Close").click()
        tab.locator("#shortcuts").wait_for(state="hidden")


# ---- numbers out of range: the field says why, Send says why, and nothing breaks ----

WRONG = (
    ("Nodes", "99999", "Nodes is 99999"),
    ("Nodes", "0", "Nodes is 0"),
    ("Top-k", "-3", "Top-k is -3"),
    ("Max new tokens", "-5", "Max new tokens is -5"),
    ("Max new tokens", "0", "Max new tokens is 0"),
    ("Max new tokens", "1.5", "Max new tokens is 1.5"),
    ("Seed", "-1", "Seed is -1"),
)
SAID = "said => document.querySelector('#settings').innerText.includes(said)"
SAID_TWICE = "said => document.querySelector('#chat').innerText.split(said).length > 2"
NOT_SAID = "said => !document.querySelector('#settings').innerText.includes(said)"
TEMPERATURE = """value => [...document.querySelectorAll('#settings input[type=number]')]
  .find(box => box.ariaLabel?.includes('Temperature'))?.value === value"""


def put(field, value: str) -> None:
    field.fill("")
    field.press_sequentially(value)
    field.blur()


def put_until(tab, field, value: str, said: str) -> None:
    """As often as it takes: what Gradio writes into a field meanwhile stands instead."""
    for _ in range(5):
        put(field, value)
        try:
            tab.wait_for_function(SAID, arg=said, timeout=15_000)
            return
        except TimeoutError:
            continue
    raise AssertionError(f"{said!r} is not said")


def test_a_number_out_of_range_is_refused_in_words(served, open_tab):
    tab, answers, asked = open_tab(), [], len(served.runner.prompts)
    tab.on("response", lambda response: answers.append(response.status))
    open_settings(tab)
    for label, value, said in WRONG:
        field = tab.locator("#settings").get_by_label(label).first
        field.wait_for()
        before = field.input_value()
        put_until(tab, field, value, said)
        tab.fill("#box textarea", "hello")
        tab.click("#send")
        tab.wait_for_function(SAID_TWICE, arg=said)
        assert tab.input_value("#box textarea") == "hello"
        put(field, before)
        tab.wait_for_function(NOT_SAID, arg=said)
    assert not [status for status in answers if status >= 500]
    assert len(served.runner.prompts) == asked
    keep_no_settings(tab)


def test_an_emptied_slider_keeps_its_value_until_another_is_typed(open_tab):
    tab, answers = open_tab(), []
    tab.on("response", lambda response: answers.append(response.status))
    open_settings(tab)
    field = tab.locator("#settings input[type=number][aria-label*=Temperature]").first
    field.fill("0.5")
    field.blur()
    for typed, kept in (("", "0.5"), ("0.25", "0.25"), ("9", "2"), ("0.25", "0.25")):
        put(field, typed)
        tab.wait_for_function(TEMPERATURE, arg=kept)
    tab.fill("#box textarea", "hello")
    tab.click("#send")
    tab.wait_for_selector("#chat .bot-row, #chat .bot")
    assert not [status for status in answers if status >= 400]
