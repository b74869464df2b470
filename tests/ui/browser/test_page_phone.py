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
    tab.wait_for_selector("svg.tree .chip")
    yield tab
    context.close()


@pytest.fixture
def phone(held) -> Iterator[Any]:
    held.set_viewport_size(PHONE)
    yield held
    held.get_by_role("tab", name="Chat").click()


def test_names_are_said_as_they_are_written(phone):
    assert "so said max_new_tokens" in phone.locator("#voice").text_content()


def test_code_is_legible_on_light_and_dark(phone):
    for look in ("light", "dark"):
        phone.emulate_media(color_scheme=look)
        phone.wait_for_function(
            "isDark => document.body.classList.contains('dark') === isDark", arg=look == "dark"
        )
        phone.wait_for_selector("#history .token.string")
        assert [one for one in findings(phone) if one.startswith("color-contrast")] == [], look
    phone.emulate_media(color_scheme="light")


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
