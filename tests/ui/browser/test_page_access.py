"""What axe-core finds on every state of the page: nothing serious, light and dark."""

from collections.abc import Iterator

import pytest
from support.access import findings
from support.page import READY, ask, last_answer, wait_attached
from support.shell import MODULES, SHARED, scripted

from medusa_chat.ui.app import Page, PageOptions, open_page

# A title too pale and a button without a name; window.mend() takes both back.
SPOIL = """() => {
  const [title, tool] = ['#brand h1', '#look .tool'].map(at => document.querySelector(at));
  const names = ['aria-label', 'title'].map(name => [name, tool.getAttribute(name)]);
  title.style.transition = 'none';
  title.style.color = '#ddd';
  names.forEach(([name]) => tool.removeAttribute(name));
  window.mend = () => {
    title.style.color = '';
    names.forEach(([name, value]) => tool.setAttribute(name, value));
  };
}"""


@pytest.fixture(params=["light", "dark"])
def look(request) -> str:
    return request.param


def settled(tab) -> list[str]:
    """What is found once the buttons under an answer, drawn after its tree, have had their time."""
    for _ in range(10):
        if not (found := findings(tab)):
            break
        tab.wait_for_timeout(500)
    return found


def test_the_check_finds_what_is_wrong(opened, resident):
    tab = resident(f"{opened.url}?__theme=light")
    tab.wait_for_selector("html.is-settled")  # what lies over the title has gone
    tab.evaluate(SPOIL)
    assert {line.split(":")[0] for line in findings(tab)} == {"color-contrast", "button-name"}
    tab.evaluate("window.mend()")


def test_the_chat_in_all_its_states_is_accessible(opened, resident, look):
    tab = resident(f"{opened.url}?__theme={look}")
    assert findings(tab) == [], "empty"
    tab.click("#settings button")
    tab.wait_for_selector("#settings input[type=range], #settings input[type=number]")
    assert findings(tab) == [], "settings open"
    ask(tab, "hello")
    tab.wait_for_selector("svg.tree .chip")
    assert settled(tab) == [], "with an answer"
    tab.click("#share .tool")
    assert findings(tab) == [], "share"
    tab.keyboard.press("Escape")
    tab.click("#settings button")


def test_the_dialog_with_a_link_is_accessible(opened, resident, tunnel, look):
    opened.share.begin(1).join()
    tab = resident(f"{opened.url}?__theme={look}")
    tab.click("#share .tool")
    tab.wait_for_selector(".share-qr")
    assert findings(tab) == []
    tab.keyboard.press("Escape")


def test_the_guests_password_page_is_accessible(opened, visitor, tunnel, look):
    opened.share.begin(1).join()
    tab = visitor(SHARED, "form", color_scheme=look)
    tab.fill("#password", "wrong")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("[role=alert]")
    assert findings(tab) == []


@pytest.fixture(scope="module")
def locked() -> Iterator[Page]:
    session = scripted()
    page = open_page(session, PageOptions(auth=("me", "secret")))
    yield page
    page.close()
    session.close()


def test_the_owners_login_is_accessible_and_opens(locked, visitor):
    for look in ("dark", "light"):
        tab = visitor(f"{locked.url}?__theme={look}", "input[type=password]")
        assert findings(tab) == []
    tab.locator("input").nth(0).fill("me")
    tab.locator("input[type=password]").fill("secret")
    tab.get_by_role("button", name="Login").click()
    tab.wait_for_selector(READY)
    wait_attached(tab)
    found, of = tab.evaluate(MODULES)
    assert found == of > 50
    ask(tab, "hello")
    assert last_answer(tab)
