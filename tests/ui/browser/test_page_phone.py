"""The page under a finger, on small and turned screens, by the keyboard and for who sees poorly."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.access import findings
from support.page import SLOW, ask, scripted_page, send, wait_attached, wait_end
from support.scripted import ScriptedRunner

HEBREW = "שלום עולם"
TEXT = f"""{HEBREW}, _so_ said max_new_tokens.

$$\\frac{{{" + ".join(f"a_{{{at}}}" for at in range(60))}}}{{b}}$$

```python
@cached
def first(name: str = "value", count: int = 42) -> None:
    return [None for x in range(10) if x != r"x"]
class Foo(Bar): pass
```

```bash
export FOO="bar"; for f in *.txt; do echo "$f" -v > /dev/null; done
```

```html
<!DOCTYPE html><a href="x" class="y">text &amp; more</a><!-- note -->
```
"""
PHONE = {"width": 390, "height": 844}
# Whether all of the conversation's box is seen where the page has not been scrolled.
IS_FREE = """() => { scrollTo(0, 0);
  const [box, composer] = ['#conversation', '#composer'].map(
    at => document.querySelector(at).getBoundingClientRect());
  return box.height >= 150 && box.bottom <= composer.top; }"""
# Whether all of the open settings is seen.
IS_SEEN = """() => {
  const [settings, send] = ['#settings [data-testid=accordion-content]', '#send'].map(
    at => document.querySelector(at).getBoundingClientRect());
  return settings.top >= 0 && settings.height > 200 && settings.bottom <= send.top; }"""
# What reaches out of the window, of what is seen; and whether the tree is whole in its box.
OUTSIDE = """() => ['#header', '#left', '#composer', '#send', '#right', '.figures']
  .map(at => document.querySelector(at)).filter(one => one.checkVisibility()).filter(one => {
    const { left, top, right, bottom } = one.getBoundingClientRect();
    return left < -1 || top < -1 || right > innerWidth + 1 || bottom > innerHeight + 1;
  }).map(one => one.id || one.className)"""
IS_WHOLE = """() => { const box = document.querySelector('.tree-box');
  return box.clientHeight > 0 && box.scrollHeight <= box.clientHeight
    && box.scrollWidth <= box.clientWidth; }"""
SMALL_TEXT = """() => [...document.querySelectorAll('textarea, select, input')]
  .filter(one => !['checkbox', 'radio', 'range', 'file'].includes(one.type))
  .filter(one => parseFloat(getComputedStyle(one).fontSize) < 16).map(one => one.outerHTML)"""
FOCUS = "document.activeElement.matches('#box textarea')"
# Whether the ring around what has the keyboard is cut off by nothing around it.
IS_RINGED = """() => {
  const { activeElement: node } = document, look = getComputedStyle(node);
  const out = parseFloat(look.outlineOffset) + parseFloat(look.outlineWidth);
  const box = node.getBoundingClientRect();
  let isWhole = look.outlineStyle === 'solid';
  for (let over = node.parentElement; over; over = over.parentElement) {
    if (getComputedStyle(over).overflow === 'visible') continue;
    const cut = over.getBoundingClientRect();
    isWhole &&= box.left - out >= cut.left && box.right + out <= cut.right;
    isWhole &&= box.top - out >= cut.top && box.bottom + out <= cut.bottom;
  }
  return isWhole;
}"""


@pytest.fixture(scope="module")
def served() -> Iterator[Any]:
    runner = ScriptedRunner(delay=0.01, prefill=0.01, steps=6, nodes=16, pieces=(TEXT, *["."] * 40))
    with scripted_page(runner) as page:
        yield page


@pytest.fixture(scope="module")
def held(served, browser) -> Iterator[Any]:
    """A phone's tab with an answer, for tests that leave it there."""
    context = browser.new_context(viewport=PHONE, has_touch=True, color_scheme="light")
    context.set_default_timeout(SLOW)
    tab = context.new_page()
    tab.goto(served.url)
    wait_attached(tab)
    tab.wait_for_selector("html.is-settled")
    ask(tab, "hello there")
    tab.wait_for_selector(".answer-strip")
    yield tab
    context.close()


@pytest.fixture
def phone(held) -> Iterator[Any]:
    held.set_viewport_size(PHONE)
    yield held
    held.get_by_role("tab", name="Chat").click()


def height(tab, selector: str) -> float:
    return tab.locator(selector).first.bounding_box()["height"]


def test_a_finger_finds_what_it_presses(phone):
    page = ("#share .tool", "#look .tool", "#tabs [role=tab]", "#list-button")
    for selector in (*page, "#send", "#settings > .label-wrap"):
        assert height(phone, selector) >= 44, selector
    phone.click(".answer-strip")
    assert height(phone, ".playbar .play") >= 44
    pitch = phone.evaluate(
        """() => { const tops = [...document.querySelectorAll('svg.tree .frame')]
          .map(one => one.getBoundingClientRect().top).sort((a, b) => a - b);
          const gaps = tops.slice(1).map((top, at) => top - tops[at]);
          return Math.min(...gaps.filter(gap => gap > 1)); }"""
    )
    assert pitch >= 24, "the nodes of the tree are too close"
    phone.get_by_role("button", name="Close the microscope").click()


def test_the_chat_fills_the_screen_and_the_strip_opens_the_microscope_over_it(phone):
    assert phone.locator("#right").is_hidden()
    assert phone.evaluate(OUTSIDE) == []
    assert phone.evaluate("document.documentElement.scrollHeight") <= PHONE["height"]
    phone.click(".answer-strip")
    phone.wait_for_selector("svg.tree .chip")
    assert phone.evaluate(OUTSIDE) == []
    phone.get_by_role("button", name="Close the microscope").click()
    assert phone.locator("#right").is_hidden()


def test_on_a_laptop_nothing_overflows_and_the_tree_is_whole(served, open_tab, monkeypatch):
    monkeypatch.setattr(served.runner, "nodes", 64)
    tab = open_tab()
    tab.set_viewport_size({"width": 1280, "height": 720})
    tab.locator("#examples button").first.click()
    wait_end(tab)
    tab.wait_for_function(IS_WHOLE)
    assert tab.evaluate(OUTSIDE) == []
    assert tab.evaluate("document.documentElement.scrollHeight") <= 720
    tab.click("#settings button")
    tab.wait_for_function(IS_SEEN)
    assert tab.locator("#send").is_visible() and tab.locator("svg.tree .chip").first.is_visible()
    tab.click("#settings button")


def test_settings_open_where_they_are_seen_and_the_page_does_not_zoom_for_what_is_written(phone):
    phone.click("#settings button")
    phone.wait_for_selector("#settings input[type=number]")
    phone.wait_for_function(IS_SEEN)
    assert phone.evaluate(SMALL_TEXT) == []
    phone.click("#settings button")


@pytest.mark.parametrize("size", [(390, 844), (360, 740), (360, 640), (844, 390), (320, 256)])
def test_the_composer_lies_over_nothing_of_the_conversation(phone, size):
    phone.set_viewport_size(dict(zip(("width", "height"), size, strict=True)))
    phone.wait_for_function(IS_FREE)
    assert phone.evaluate("document.documentElement.scrollWidth") <= size[0]


def test_the_tabs_and_the_model_are_seen(phone):
    assert "scripted" in phone.inner_text("#status")
    phone.evaluate(
        "import('medusa/page.js').then(({ notify }) =>"
        " notify('warning', 'Something has to be told. '.repeat(12), 0))"
    )
    note, header = phone.locator("#notices button").bounding_box(), phone.locator("#header")
    assert note["height"] > 80 and note["y"] + note["height"] <= header.bounding_box()["y"]
    phone.click("#notices button")
    assert phone.locator("#notices button").count() == 0 and header.bounding_box()["y"] == 0
    phone.set_viewport_size({"width": 300, "height": 640})  # of 390, drawn at 130 %
    phone.wait_for_function(
        "() => document.querySelectorAll('#tabs [role=tab]').length === 4 &&"
        "[...document.querySelectorAll('#tabs [role=tab]')].every(one => one.checkVisibility())"
    )
    assert height(phone, "#header") < 110, "its buttons stand in two rows"


def test_a_wide_formula_scrolls_in_its_line(phone):
    wide, shown, how = phone.locator("#history .katex-display").first.evaluate(
        "node => [node.scrollWidth, node.clientWidth, getComputedStyle(node).overflowX]"
    )
    assert wide > shown and how == "auto"


def test_names_are_said_as_they_are_written(phone):
    assert "so said max_new_tokens" in phone.locator("#voice").text_content()


# Colours have come to their end; what moves for ever does not count.
STILL = """() => document.getAnimations().every(one =>
  one.playState !== 'running' || one.effect.getTiming().iterations === Infinity)"""


def test_code_is_legible_on_light_and_dark(phone):
    for look in ("light", "dark"):
        phone.emulate_media(color_scheme=look)
        phone.wait_for_function(
            "isDark => document.body.classList.contains('dark') === isDark", arg=look == "dark"
        )
        phone.wait_for_selector("#history .token.string")
        phone.wait_for_function(STILL)
        assert [one for one in findings(phone) if one.startswith("color-contrast")] == [], look
    phone.emulate_media(color_scheme="light")


def test_a_comparison_has_each_line_by_its_script(phone):
    phone.get_by_role("tab", name="Compare").click()
    phone.get_by_role("button", name="Run both").click()
    phone.wait_for_selector(".compare-block.has-result .lane-text")
    phone.wait_for_function(
        "text => document.querySelector('.lane-text').textContent.startsWith(text)", arg=HEBREW
    )
    gap = phone.evaluate(
        """count => { const lane = document.querySelector('.lane-text');
          const texts = document.createTreeWalker(lane, NodeFilter.SHOW_TEXT);
          const range = document.createRange();
          range.setStart(texts.nextNode(), 0);
          range.setEnd(texts.currentNode, count);
          return lane.getBoundingClientRect().right - range.getBoundingClientRect().right; }""",
        len(HEBREW),
    )
    assert gap < 20, "Hebrew begins on the left"


def test_the_keyboard_is_never_left_nowhere_and_is_seen(served, open_tab, monkeypatch):
    tab = open_tab()
    tab.focus("#box textarea")
    assert tab.evaluate(IS_RINGED), "nothing shows that the box has the keyboard"
    monkeypatch.setattr(served.runner, "hold_at", 2)
    send(tab, "hello")
    tab.focus("#stop")
    tab.keyboard.press("Enter")
    wait_end(tab)
    assert tab.evaluate(FOCUS), "after Stop"
    tab.get_by_role("button", name="Edit").first.click()
    tab.locator("#history textarea").focus()
    tab.keyboard.press("Escape")
    tab.wait_for_selector("#history textarea", state="detached")
    assert tab.evaluate(FOCUS), "after an edit"


def test_the_settings_tell_whether_they_are_open(open_tab):
    tab = open_tab()
    opener = "#settings > .label-wrap[aria-expanded={}]"
    tab.wait_for_selector(opener.format("false"))
    tab.click("#settings button")
    tab.wait_for_selector(opener.format("true"))
    tab.click("#settings button")
    tab.wait_for_selector(opener.format("false"))
