"""The chat itself in a real browser, on a scripted model: turns, tint, settings, tabs, keys."""

import json
import re
import threading
from itertools import pairwise

import pytest
from support.page import (
    answered,
    ask,
    drawn_frames,
    keep_no_settings,
    last_answer,
    open_settings,
    press,
    reload,
    send,
    wait_end,
)
from support.waiting import wait_for

from medusa_chat.ui.chat.chat_session import ChatSession

WRITTEN = "n => (document.querySelector('#live-text .md')?.textContent.length || 0) > n"
# Lengths of the live text, as each frame shows it.
WATCH = """() => {
  window.lengths = [];
  const look = () => {
    if (!window.lengths) return;
    window.lengths.push(document.querySelector('#live-text .md')?.textContent.length || 0);
    requestAnimationFrame(look);
  };
  look();
}"""
STORED = "text => localStorage.getItem('medusa-chat-settings')?.includes(text)"
ROWS = "n => document.querySelectorAll('#history .message-row').length === n"
# Markdown in which « and » stand around what is not drawn.
MARKED = """Here is some prose with «**»bold text«**», «*»leaning«*» and «`»in-line«`»: 3 * 4 < 5.

«1. »one apple
«2. »two pears - and 2. again

«```python»
def pear(p):
    return [p] * 2  # | not a table
«```»

«| »a «| »b «|»
«|---|---|»
«| »c «| »d «|»
«| »e f «| »g «|»

«> »quoted «[»link«](https://example.com/next)» then next words - done.

"""
MARKDOWN = re.sub("[«»]", "", MARKED)
PIECES = tuple(MARKDOWN[k : k + 3] for k in range(0, len(MARKDOWN), 3))
LANGUAGES = """([id, wanted]) => JSON.stringify(wanted) === JSON.stringify(
  [...document.querySelectorAll(`#${id} .code_wrap`)].map(one => one.dataset.language || ''))"""
# What is drawn of the last answer, character by character, with the level of its tint.
TINTED = """() => {
  const target = [...document.querySelectorAll(
    '#history .bot .message-content:not(:has(.answer-note))')].pop();
  const levels = new Map();
  for (let n = 1; n <= 5; n++)
    for (const range of CSS.highlights.get(`tokens-${n}`)) {
      const node = range.startContainer;
      if (!levels.has(node)) levels.set(node, []);
      for (let k = range.startOffset; k < range.endOffset; k++) levels.get(node)[k] = n;
    }
  const walker = document.createTreeWalker(target, NodeFilter.SHOW_TEXT);
  const all = [];
  while (walker.nextNode()) {
    const node = walker.currentNode;
    if (node.parentElement.closest('button')) continue;
    [...node.data].forEach((c, k) => /\\S/.test(c) && all.push([c, levels.get(node)?.[k] || 0]));
  }
  return all;
}"""


def rows(tab, count: int) -> None:
    tab.wait_for_function(ROWS, arg=count)


def edit(tab, row: int, text: str) -> None:
    tab.get_by_role("button", name="Edit").nth(row).click()
    tab.locator("#history textarea").fill(text)
    tab.locator("#history button[aria-label='Submit']").click()


@pytest.fixture
def slow(runner, monkeypatch):
    """An answer that runs until it is stopped."""
    monkeypatch.setattr(runner, "hold_at", 12)
    runner.prompts.clear()
    return runner


def test_turns_are_regenerated_continued_edited_undone_and_cleared(quick, open_tab):
    tab = open_tab()
    assert tab.locator("#regenerate").is_disabled() and tab.locator("#undo").is_disabled()
    ask(tab, "first")
    rows(tab, 2)
    first = last_answer(tab)

    tab.keyboard.press("Alt+r")
    tab.wait_for_selector(".versions")  # that one runs the page does not know at once
    wait_end(tab)
    rows(tab, 2)
    assert quick.prompts == [[{"role": "user", "content": "first"}]] * 2

    before = len(quick.prompts)
    tab.click("#proceed")
    tab.wait_for_function(
        "n => document.querySelector('#history .bot .message-content')?.innerText.length > n",
        arg=len(first),
    )
    wait_end(tab)
    assert len(quick.prompts) == before + 1 and quick.prompts[-1][-1]["role"] == "assistant"
    assert last_answer(tab).startswith(first) and tab.locator("#history .bot").count() == 1

    with answered(tab, "history"):  # it is drawn before it is sent
        edit(tab, 1, "my own words")
    assert "my own" in last_answer(tab)
    assert len(quick.prompts) == before + 1  # nothing was sent

    with answered(tab, "history"):
        edit(tab, 0, "changed")
    wait_end(tab)
    rows(tab, 2)
    assert "changed" in tab.inner_text("#history .user")
    assert quick.prompts[-1] == [{"role": "user", "content": "changed"}]

    press(tab, "undo")  # the edit
    tab.wait_for_function(
        "() => document.querySelector('#history .bot')?.innerText.includes('my own')"
    )
    press(tab, "redo")
    tab.wait_for_function("document.querySelector('#history .user')?.innerText.includes('changed')")
    tab.wait_for_function("() => !document.querySelector('#redo')?.checkVisibility()")
    press(tab, "undo")
    tab.wait_for_function(
        "() => document.querySelector('#history .bot')?.innerText.includes('my own')"
    )
    press(tab, "undo")  # the edit of the answer
    tab.wait_for_function(
        "t => document.querySelector('#history .bot').innerText.startsWith(t)", arg=first
    )
    press(tab, "undo")  # the answer that was generated again
    tab.wait_for_function("t => document.querySelector('#history .bot').innerText === t", arg=first)
    press(tab, "undo")
    rows(tab, 0)
    tab.wait_for_function("() => document.querySelector('#box textarea')?.value === 'first'")
    tab.press("#box textarea", "Enter")
    rows(tab, 2)
    wait_end(tab)
    tab.keyboard.press("Control+Shift+O")
    tab.wait_for_selector("#examples")
    rows(tab, 0)


def test_what_is_typed_is_counted_in_tokens_against_what_is_left(quick, open_tab):
    tab, count = open_tab(), "text => document.querySelector('.count-block').textContent === text"
    tab.locator("#box textarea").fill("four words in all")
    tab.wait_for_function(count, arg="4 tokens, 1,000 left")
    tab.locator("#box textarea").fill("")
    tab.wait_for_function(count, arg="")
    ask(tab, "and four words more")
    tab.wait_for_function(count, arg="")
    tab.locator("#box textarea").fill("and four words more")  # the same question again
    tab.wait_for_function(count, arg="4 tokens, 1,000 left")


def test_an_edit_made_before_the_last_one_was_answered_is_not_lost(quick, open_tab, monkeypatch):
    tab = open_tab()
    ask(tab, "first")
    edited, go_on = ChatSession.edit, threading.Event()

    def held(chat, row, inputs):
        assert row.position == 0 or go_on.wait(240)
        edited(chat, row, inputs)

    monkeypatch.setattr(ChatSession, "edit", held)
    edit(tab, 1, "my own words")
    edit(tab, 0, "changed")  # which the page sends once the one before is answered
    go_on.set()
    tab.wait_for_selector("#history .user-row:has-text('changed')")  # shown before it is answered
    wait_for(lambda: quick.prompts[-1] == [{"role": "user", "content": "changed"}])
    wait_end(tab)


def test_a_message_written_meanwhile_waits_in_sight_and_can_be_dropped(
    slow,
    open_tab,
):
    tab = open_tab()
    send(tab, "first")
    tab.wait_for_function(WRITTEN, arg=5)
    for text in ("second", "third"):
        tab.fill("#box textarea", text)
        tab.press("#box textarea", "Enter")
        tab.wait_for_selector(f".next-line:has-text('next: {text}')")
    assert tab.input_value("#box textarea") == ""
    tab.get_by_role("button", name="Do not send: second").click()
    tab.wait_for_selector(".next-line:has-text('second')", state="detached")
    tab.keyboard.press("Escape")
    tab.wait_for_function("() => document.querySelectorAll('#history .user').length === 2")
    assert "third" in tab.locator("#history .user").last.inner_text()
    wait_for(lambda: [turns[-1]["content"] for turns in slow.prompts] == ["first", "third"])
    assert tab.locator(".next-line").count() == 0
    tab.keyboard.press("Escape")
    wait_end(tab)


def test_the_text_only_grows_while_it_comes(served, open_tab, monkeypatch):
    runner, grown = served.runner, 0
    monkeypatch.setattr(runner, "steps", 50)
    monkeypatch.setattr(runner, "hold_at", 5)
    tab = open_tab()
    tab.evaluate(WATCH)
    send(tab, "hi")
    for runner.hold_at in (10, 15, 20, 25, 30, None):
        grows = tab.wait_for_function(
            "before => Math.max(...window.lengths) > before && Math.max(...window.lengths)",
            arg=grown,
        )
        grown = grows.json_value()
    wait_end(tab)
    tab.wait_for_function("() => window.lengths.at(-1) === 0")
    lengths = tab.evaluate("window.lengths")
    tab.evaluate("delete window.lengths")
    shown = [n for n in lengths if n]
    assert len(set(shown)) > 5, "it is seen to grow"
    # markup that is drawn at last takes less chat than the signs it was written with
    assert all(now > before - 12 for before, now in pairwise(shown))
    assert lengths[lengths.index(shown[0]) :].index(0) == len(shown), "empty once it is over"


def test_reasoning_is_folded_while_they_come_and_afterwards(quick, open_tab, monkeypatch):
    pieces = ("<think>", "Hm, ", "secretly", ".</think>", "Yes", *[", it is so"] * 20)
    monkeypatch.setattr(quick, "pieces", pieces)
    monkeypatch.setattr(quick, "steps", 3)
    monkeypatch.setattr(quick, "hold_at", 1)
    tab = open_tab()
    send(tab, "hi")
    tab.wait_for_selector(".live-thought")
    assert tab.locator(".live-thought[open]").count() == 0
    assert "secretly" not in tab.inner_text("#conversation")
    tab.wait_for_function("() => document.querySelector('#live-text')?.innerText.includes('Yes')")
    thought, text = (tab.locator(one).bounding_box() for one in (".live-thought", "#live-text"))
    assert thought["y"] + thought["height"] <= text["y"], "as it stands in the conversation"
    quick.hold_at = None
    wait_end(tab)
    tab.wait_for_selector("#history .thought-group")
    assert "secretly" not in tab.inner_text("#history")
    assert "think>" not in tab.inner_text("#history")
    tab.locator("#history .thought-group .title").first.click()
    tab.wait_for_function(
        "() => document.querySelector('#history')?.innerText.includes('secretly')"
    )


def test_the_strip_below_an_answer_says_who_gave_it_and_opens_the_microscope_on_its_steps(
    quick, open_tab
):
    tab = open_tab()
    ask(tab, "one")
    ask(tab, "two")
    tab.check("#vanilla input")
    ask(tab, "three")
    tab.uncheck("#vanilla input")
    keep_no_settings(tab)
    strips = tab.locator("#history .answer-strip")
    tab.wait_for_function("document.querySelectorAll('#history .answer-strip').length === 3")
    for title, how in zip(
        [strips.nth(place).get_attribute("title") for place in range(3)],
        (*[r"\d\.\d tokens a step"] * 2, "plain"),
        strict=True,
    ):
        assert re.fullmatch(rf"scripted · [\d.,]+ tokens/s · {how}", title), title
    tab.get_by_role("button", name="Close the microscope").click()
    assert tab.locator("#right").is_hidden() and tab.locator("svg.bars").is_hidden()
    strips.first.click()
    tab.wait_for_selector("#history .message-row.is-shown")
    tab.locator(".newest").wait_for()  # it is an earlier answer
    most = int(tab.get_attribute("svg.tree", "data-step"))
    total = int(tab.get_attribute("svg.bars", "aria-valuemax"))
    assert total == 1 or most < total - 1, "the last step may be cut by the end of the text"
    tab.evaluate("localStorage.removeItem('medusa-chat-pane')")
    order = tab.locator("#history .bot-row + .message-buttons").first.evaluate(
        "bar => [...bar.children].map(one => one.className.split(' ')[0])"
    )
    assert order[:2] == ["answer-strip", "icon-button-wrapper"], "it is not read after the answer"


def test_blocks_of_code_name_their_language_and_are_copied_without_it(quick, open_tab, monkeypatch):
    text = f"Thus:\n\n```python\n    x = '{'long ' * 60}'\n    y = 2\n```\n\n```\nnone\n```\n"
    monkeypatch.setattr(quick, "pieces", (text, *[" "] * 60))
    monkeypatch.setattr(quick, "hold_at", 2)
    tab = open_tab()
    tab.set_viewport_size({"width": 390, "height": 844})
    send(tab, "code")
    tab.wait_for_function(LANGUAGES, arg=["live-text", ["python", ""]])
    height = "document.querySelector('{} .code_wrap').offsetHeight"
    before = tab.evaluate(height.format("#live-text"))
    quick.hold_at = None
    wait_end(tab)
    tab.wait_for_function(LANGUAGES, arg=["history", ["python", ""]])
    assert tab.evaluate(height.format("#history")) == before
    tab.evaluate("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    block = tab.locator("#history .code_wrap").first
    block.locator("button").click()
    tab.wait_for_function("() => window.copied")
    assert tab.evaluate("window.copied") == f"    x = '{'long ' * 60}'\n    y = 2"
    label = "(node, part) => getComputedStyle(node, part).content"
    assert block.evaluate(label, "::before") == '"python"'
    tab.wait_for_function(
        "() => getComputedStyle(document.querySelector('#history .code_wrap button'), '::after')"
        ".content === '\"Copied\"'"
    )
    wide, shown = block.locator("pre").evaluate("pre => [pre.scrollWidth, pre.clientWidth]")
    assert wide > shown, "the line is not scrolled in its block"
    assert tab.evaluate("document.documentElement.scrollWidth") == 390
    tab.emulate_media(media="print")
    wide, shown = block.locator("pre").evaluate("pre => [pre.scrollWidth, pre.clientWidth]")
    assert wide == shown and block.locator("button").is_hidden(), "paper does not scroll"
    tab.emulate_media(media="screen")


def test_the_tint_is_each_steps_own_and_changes_no_text(served, open_tab, monkeypatch):
    runner = served.runner
    monkeypatch.setattr(runner, "pieces", PIECES)
    monkeypatch.setattr(runner, "steps", 400)
    monkeypatch.setattr(runner, "delay", 0.001)
    tab = open_tab()
    open_settings(tab)
    tab.get_by_label("Max new tokens").fill(str(len(PIECES)))
    tab.click("#settings button")
    ask(tab, "hi")
    plain = tab.inner_text("#history")
    assert tab.evaluate("CSS.highlights.get('tokens-2').size") == 0
    tab.check("#tint-switch")
    tab.wait_for_function("() => [...CSS.highlights.values()].some(h => h.size > 0)")
    shown = tab.evaluate(TINTED)
    assert tab.inner_text("#history") == plain
    assert [c for c, level in shown if not level] == []
    assert levels_of(shown) == expected_levels(runner, shown)

    tab.evaluate(
        "getSelection().selectAllChildren(document.querySelector('#history .bot .message-content'))"
    )
    copied = tab.evaluate("getSelection().toString()")
    tab.uncheck("#tint-switch")
    tab.wait_for_function("() => [...CSS.highlights.values()].every(h => h.size === 0)")
    assert tab.evaluate("getSelection().toString()") == copied and "tokens" not in copied

    tab.check("#tint-switch")
    reload(tab)
    tab.wait_for_selector("#history .bot")
    tab.wait_for_function("() => [...CSS.highlights.values()].some(h => h.size > 0)")
    assert tab.is_checked("#tint-switch")
    assert levels_of(tab.evaluate(TINTED)) == levels_of(shown)


def levels_of(shown) -> str:
    return "".join(str(level) for _, level in shown)


def expected_levels(runner, shown) -> str:
    """The level of each drawn character, from the trace; the text may have begun anew."""
    pieces = [(runner.pieces[0], 1)] + [(s.text, len(s.token_ids)) for s in runner.last]
    levels = [min(5, n) for text, n in pieces for _ in text]
    is_drawn, inside = [], False
    for character in MARKED:
        if character in "«»":
            inside = character == "«"
        else:
            is_drawn.append(not inside and not character.isspace())
    size = len(MARKDOWN)
    places = [k for k in range(len(levels)) if is_drawn[k % size]]
    assert [MARKDOWN[k % size] for k in places] == [c for c, _ in shown]
    return "".join(str(levels[k]) for k in places)


SELECT = """() => {
  const text = document.querySelector('#live-text .md p')?.firstChild;
  if (!(text?.length > 12)) return false;
  document.activeElement.blur();
  getSelection().setBaseAndExtent(text, 2, text, 12);
  return true;
}"""


def test_what_is_selected_in_an_answer_stays_selected_to_its_end(slow, open_tab):
    tab = open_tab()
    slow.hold_at = None
    ask(tab, "hi")  # its answer begins with the same words
    slow.hold_at = 12
    send(tab, "hi")
    tab.wait_for_function(SELECT)
    chosen = tab.evaluate("String(getSelection())")
    assert len(chosen) == 10
    slow.hold_at = 40
    tab.wait_for_function(WRITTEN, arg=120)
    assert tab.evaluate("String(getSelection())") == chosen
    slow.hold_at = None
    wait_end(tab)
    tab.wait_for_function("t => String(getSelection()) === t", arg=chosen)
    row = "getSelection().anchorNode.parentElement.closest('#history .message-row')"
    assert tab.evaluate(f"[...document.querySelectorAll('.message-row')].indexOf({row})") == 3


def test_an_answer_restyles_and_searches_little_of_a_long_conversation(quick, open_tab, browser):
    """The begin and the end of an answer cost a restyling of every element, eight times over with
    the highlights' rules for each; and each word that came, a search through all rows."""
    tab = open_tab()
    for _ in range(4):
        ask(tab, "hi")
    browser.start_tracing(page=tab, categories=["devtools.timeline"])
    tab.evaluate(
        """() => {
          const conversation = document.querySelector('#conversation');
          conversation.setAttribute('data-busy', 'true');
          conversation.offsetTop;
          for (const row of conversation.querySelectorAll('.selectable'))
            row.dir = 'ltr'; // as Gradio does with every drawing
          conversation.offsetTop;
          conversation.setAttribute('data-busy', 'false');
        }"""
    )
    events = json.loads(browser.stop_tracing())["traceEvents"]
    restyled = [e["args"].get("elementCount", 0) for e in events if e["name"] == "UpdateLayoutTree"]
    assert 0 < max(restyled) < tab.locator("#history *").count()
    searched = tab.evaluate(
        """async () => {
          const seen = [];
          for (const kind of [Document, Element]) {
            const search = kind.prototype.querySelectorAll;
            kind.prototype.querySelectorAll = function (selector) {
              if (selector.includes('#history')) seen.push(selector);
              return search.call(this, selector);
            };
          }
          const frame = () => new Promise(requestAnimationFrame);
          document.querySelector('#live-text .md').append('a word');
          for (let n = 0; n < 3; n++) await frame();
          document.querySelector('#live-text .md').replaceChildren();
          return seen;
        }"""
    )
    reload(tab)  # its searches are its own again
    assert searched == []


def test_settings_are_remembered_say_what_they_do_and_can_be_reset(quick, open_tab):
    tab = open_tab()
    open_settings(tab)
    assert "no effect" in tab.inner_text("#lock")
    tab.get_by_label("number input for Min-p").fill("0.05")
    tab.get_by_label("number input for Min-p").blur()
    tab.wait_for_function(STORED, arg='"min_p":0.05')
    tab.get_by_label("typical-sampled: lossy").check()  # answered once all fields are drawn
    tab.wait_for_function("() => document.querySelector('#lock input')?.disabled === false")
    for seed in ("10", "", "11"):  # as by a paste and by Backspace
        tab.get_by_label("Seed").fill(seed)
        tab.get_by_label("Seed").blur()
        tab.wait_for_function(STORED, arg=f'"seed":"{seed}"')
    tab.get_by_label("typical: lossy").check()
    tab.wait_for_function(
        "() => document.querySelector('#settings')?.innerText.includes('is deterministic')"
    )
    assert tab.get_by_label("Seed").is_disabled()
    assert "locked: δ = √ε" in tab.inner_text("#settings")
    tab.get_by_label("number input for ε").fill("0.25")
    tab.get_by_label("number input for ε").blur()
    tab.wait_for_function(
        "() => [...document.querySelectorAll('#settings input[type=number]')]"
        ".some(e => e.getAttribute('aria-label')?.includes('δ') && e.value === '0.5')"
    )
    tab.wait_for_function(STORED, arg='"posterior_threshold":0.25')
    reload(tab)
    tab.wait_for_selector("#settings button")
    tab.click("#settings button")
    tab.wait_for_function(
        "() => document.querySelector('#acceptance input:checked')?.value==='typical'"
    )
    ask(tab, "hello")
    settings = quick.settings[-1]
    assert settings.acceptance == "typical" and settings.seed == 11 and settings.min_p == 0.05
    assert (settings.posterior_threshold, settings.posterior_alpha) == (0.25, 0.5)
    tab.click("#reset")
    tab.wait_for_function(
        "() => document.querySelector('#acceptance input:checked')?.value==='exact'"
    )
    ask(tab, "again")
    assert quick.settings[-1].acceptance == "exact" and quick.settings[-1].seed is None
    assert quick.settings[-1].posterior_alpha == pytest.approx(0.3)
    assert quick.settings[-1].min_p == 0
    keep_no_settings(tab)


def test_a_reload_and_a_second_tab_follow_the_same_answer(slow, open_tab, monkeypatch):
    monkeypatch.setattr(
        "medusa_chat.ui.chat.answer_run.HIDDEN_SECONDS", 300
    )  # a reload may take its time
    tab = open_tab()
    send(tab, "hello there")
    tab.wait_for_function(WRITTEN, arg=40)
    before = tab.text_content("#live-text .md")
    reload(tab)
    tab.wait_for_function(WRITTEN, arg=len(before) - 1)
    assert tab.text_content("#live-text .md").startswith(before[:20])
    assert "hello there" in tab.inner_text("#history .user")
    tab.wait_for_selector("svg.tree .chip")

    other = open_tab()
    other.wait_for_function(WRITTEN, arg=len(before) - 1)
    assert "hello there" in other.inner_text("#history .user")
    other.fill("#box textarea", "from the other")
    other.press("#box textarea", "Enter")
    tab.wait_for_selector(".next-line:has-text('from the other')")
    slow.hold_at = None
    for one in (tab, other):
        rows(one, 4)
        wait_end(one)
    assert last_answer(tab) == last_answer(other)
    assert len(slow.prompts) >= 2 and slow.prompts[-1][-1]["content"] == "from the other"
    tab.click("#clear")
    rows(tab, 0)
    rows(other, 4)


def test_a_new_chat_takes_the_draft_of_an_empty_one_along(open_tab):
    """The tab of before a reload still counts as one that shows it."""
    tab = open_tab()
    reload(tab)
    tab.fill("#box textarea", "not sent yet")
    press(tab, "clear")
    assert tab.input_value("#box textarea") == "not sent yet"
    tab.fill("#box textarea", "")


def test_what_is_typed_while_the_server_answers_stays(quick, open_tab):
    tab, held, is_held = open_tab(), [], threading.Event()

    def meet(route):
        if is_held.is_set():
            held.append(route)
        else:
            route.continue_()

    def type_while_it_waits(act, text):
        is_held.set()
        act()
        tab.type("#box textarea", text)
        is_held.clear()
        while held:
            held.pop(0).continue_()

    tab.route("**/run/predict*", meet)
    tab.fill("#box textarea", "the first")
    type_while_it_waits(lambda: tab.press("#box textarea", "Enter"), "the second")
    tab.wait_for_function("document.querySelector('#box textarea').value === 'the second'")
    rows(tab, 2)
    wait_end(tab)
    type_while_it_waits(lambda: tab.click("#clear"), ", then this")
    tab.wait_for_function("document.querySelector('#box textarea').value === ', then this'")
    rows(tab, 0)
    tab.press("#box textarea", "Enter")
    rows(tab, 2)
    assert ", then this" in tab.inner_text("#history .user")
    tab.unroute("**/run/predict*")


def test_no_message_is_lost_or_sent_twice_while_the_answer_to_one_does_not_come(quick, open_tab):
    tab, held = open_tab(), []

    def meet(route):
        is_send = '"the first"' in (route.request.post_data or "")
        if is_send and not held:
            held.append((route, route.fetch()))
        else:
            route.continue_()

    tab.route("**/run/predict*", meet)
    tab.fill("#box textarea", "the first")
    for _ in range(2):  # the second press is for a message that is under way
        tab.press("#box textarea", "Enter")
    rows(tab, 2)  # a look of the tab brought them
    wait_end(tab)
    tab.fill("#box textarea", "the second")
    tab.press("#box textarea", "Enter")
    rows(tab, 4)
    wait_end(tab)
    assert [turns[-1]["content"] for turns in quick.prompts] == ["the first", "the second"]
    tab.unroute("**/run/predict*")


DROP = """files => {
  const data = new DataTransfer();
  for (const [name, text] of files) data.items.add(new File([text], name));
  for (const type of ['dragover', 'drop'])
    document.querySelector('#conversation').dispatchEvent(
      new DragEvent(type, {dataTransfer: data, bubbles: true, cancelable: true}));
}"""


def test_text_files_go_into_the_box_named_and_fenced_and_nowhere_else(quick, open_tab):
    tab, posted = open_tab(), []
    tab.on("request", lambda request: posted.append(request.post_data_buffer or b""))
    tab.fill("#box textarea", "before after")
    tab.evaluate("document.querySelector('#box textarea').setSelectionRange(7, 7)")
    opener = tab.get_by_role("button", name="Add text or PDF files to the message")
    with tab.expect_file_chooser() as chooser:
        opener.press("Enter")
    assert chooser.value.is_multiple()
    texts = {"a.md": "secret é\n```\nx\n```", "b.txt": "secret b\n"}
    files = {**texts, "c.bin": b"\0\1", "d.bin": b"\xff\xfe", "e.txt": "e" * 1_000_001}
    chooser.value.set_files(
        [
            {"name": name, "mimeType": "", "buffer": t if isinstance(t, bytes) else t.encode()}
            for name, t in files.items()
        ]
    )
    tab.wait_for_selector("#notices :text('e.txt was not added')")
    notices = tab.locator("#notices button").all_inner_texts()
    names = [line.split(" was not added: ")[0] for line in notices]
    assert names == ["c.bin", "d.bin", "e.txt"]
    assert "no text in UTF-8" in notices[0] and "larger than 1,000,000" in notices[2]
    added = "a.md\n````\nsecret é\n```\nx\n```\n````\n" + "b.txt\n```\nsecret b\n```\n"
    assert tab.input_value("#box textarea") == f"before \n\n{added}after"
    assert tab.evaluate("document.activeElement.matches('#box textarea')")

    tab.fill("#box textarea", "")
    tab.evaluate(DROP, [["c.py", "c"], ["d.py", "d"]])
    dropped = "c.py\n```\nc\n```\nd.py\n```\nd\n```\n"
    tab.wait_for_function("t => document.querySelector('#box textarea').value === t", arg=dropped)
    # but for the count of its tokens, which it is asked for after a pause
    assert not [body for body in posted if b"secret" in body and b'"asked":' not in body]
    tab.press("#box textarea", "Enter")
    rows(tab, 2)
    wait_end(tab)
    assert quick.prompts[-1][-1]["content"] == dropped
    tab.locator("#notices").evaluate("node => node.replaceChildren()")


def test_keys_focus_and_finished_sentences(quick, open_tab, monkeypatch):
    monkeypatch.setattr(quick, "steps", 20)
    tab = open_tab()
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("?")
    tab.wait_for_selector("#shortcuts[open]")
    assert "stop the answer" in tab.inner_text("#shortcuts")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#shortcuts", state="hidden")
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.tagName") == "TEXTAREA"
    tab.keyboard.type("a/?")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("b")
    assert tab.input_value("#box textarea") == "a/?\nb"
    tab.keyboard.press("Enter")
    rows(tab, 2)
    wait_end(tab)
    assert quick.prompts[-1][-1]["content"] == "a/?\nb"

    said = tab.evaluate("[...document.querySelectorAll('#voice p')].map(p => p.textContent)")
    whole = re.sub(r"[\W_]+", "", last_answer(tab))
    assert re.sub(r"[\W_]+", "", "".join(said)) == whole  # each word once
    assert all(re.search(r"[.!?…]\s*$", text) for text in said[:-1])
    live = "#history [aria-live=polite], #live-text[aria-live], #live-text [aria-live]"
    assert tab.locator(live).count() == 0 and tab.locator("#voice[aria-live=polite]").count() == 1

    tab.evaluate(
        "() => { window.steps = []; document.querySelector('#tree svg.bars')"
        ".addEventListener('keydown', e => window.steps.push(e.key)); }"
    )
    tab.focus("#box textarea")
    tab.keyboard.press("ArrowLeft")
    tab.evaluate("document.activeElement.blur()")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("ArrowRight")
    assert tab.evaluate("window.steps") == ["ArrowLeft", "ArrowRight"]


def test_a_click_on_an_earlier_answer_shows_its_steps(quick, open_tab, monkeypatch):
    tab = open_tab()
    ask(tab, "first")
    rows(tab, 2)
    monkeypatch.setattr(quick, "steps", 7)
    ask(tab, "second")
    rows(tab, 4)
    tab.wait_for_selector('svg.tree[data-step="6"]')
    tab.locator("#history .bot .message-content").first.click()
    tab.wait_for_selector('svg.tree[data-step="3"]')


@pytest.mark.parametrize("height", [420, 900])
def test_the_box_of_an_edit_is_seen_at_every_height(quick, open_tab, monkeypatch, height):
    monkeypatch.setattr(quick, "steps", 60)
    tab = open_tab()
    tab.set_viewport_size({"width": 1280, "height": height})
    ask(tab, "first")
    ask(tab, "second")
    for row in (0, 1):
        tab.locator('#history button[aria-label="Edit"]').nth(row).evaluate("node => node.click()")
        tab.wait_for_selector("#history .edit-textarea")
        drawn_frames(tab, 2)
        box = tab.locator("#history .edit-textarea").bounding_box()
        seen = tab.locator("#conversation").bounding_box()
        assert seen["y"] <= box["y"] + 1 < seen["y"] + seen["height"] - 30
        tab.keyboard.press("Escape")
        tab.evaluate("document.querySelector('#history button[aria-label=Cancel]')?.click()")
        tab.wait_for_selector("#history .edit-textarea", state="detached")


def test_text_can_be_selected_right_after_a_click_on_a_word(quick, open_tab):
    tab = open_tab()
    ask(tab, "first")
    at = tab.locator("#history .bot .message-content p").first.bounding_box()
    x, y = int(at["x"]) + 120, int(at["y"]) + 9
    tab.mouse.click(x, y)
    tab.mouse.down()
    tab.mouse.move(x + 160, y, steps=5)
    tab.mouse.up()
    assert len(tab.evaluate("String(getSelection())")) > 8


def test_the_dot_of_a_chosen_setting_stays_below_the_pointer(quick, open_tab):
    tab = open_tab()
    open_settings(tab)
    ground = "getComputedStyle(document.querySelector('#acceptance input:checked')).backgroundColor"
    tab.mouse.move(0, 0)
    before = tab.evaluate(ground)
    tab.locator("#acceptance input:checked").hover()
    drawn_frames(tab, 20)  # colours change slowly
    assert tab.evaluate(ground) == before
    tab.click("#settings button")
