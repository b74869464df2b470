"""What axe-core finds on every state of the page: nothing serious, light and dark."""

from collections.abc import Iterator

import pytest
from test_page import send, wait_end
from test_page_shell import (
    READY,
    SHARED,
    browser,  # noqa: F401
    opened,  # noqa: F401
    scripted,
    tunnel,  # noqa: F401
    visitor,  # noqa: F401
)

from medusa_chat.ui.app import Page, PageOptions, open_page

# Findings inside Gradio's own markup that a page cannot change: rule -> part of the selector, why.
GRADIOS_OWN: dict[str, tuple[str, str]] = {}


def findings(tab) -> list[str]:
    """Serious and critical findings, a line each: rule, element, what is wrong."""
    from axe_playwright_python.sync_playwright import Axe

    found = []
    for violation in Axe().run(tab).response["violations"]:
        if violation["impact"] not in ("serious", "critical"):
            continue
        part, _ = GRADIOS_OWN.get(violation["id"], ("\0", ""))
        for node in violation["nodes"]:
            target = " ".join(map(str, node["target"]))
            if part not in target:
                said = node["failureSummary"].replace("\n", " ")
                found.append(f"{violation['id']}: {target}: {said}")
    return found


@pytest.fixture(params=["light", "dark"])
def look(request) -> str:
    return request.param


def test_the_check_finds_what_is_wrong(opened, visitor):  # noqa: F811
    tab = visitor(opened.url)
    tab.evaluate("document.querySelector('#brand h1').style.color = '#ddd'")
    tab.evaluate("document.querySelector('#look .tool').removeAttribute('aria-label')")
    tab.evaluate("document.querySelector('#look .tool').removeAttribute('title')")
    assert {line.split(":")[0] for line in findings(tab)} == {"color-contrast", "button-name"}


def test_the_chat_in_all_its_states_is_accessible(opened, visitor, look):  # noqa: F811
    tab = visitor(f"{opened.url}?__theme={look}")
    assert findings(tab) == [], "empty"
    tab.click("#settings button")
    tab.wait_for_selector("#settings input[type=range], #settings input[type=number]")
    assert findings(tab) == [], "settings open"
    send(tab, "hello")
    wait_end(tab)
    tab.wait_for_selector("svg.tree .chip")
    assert findings(tab) == [], "with an answer"
    tab.click("#share .tool")
    assert findings(tab) == [], "share"


def test_the_dialog_with_a_link_is_accessible(opened, visitor, tunnel, look):  # noqa: F811
    opened.share.begin(1).join()
    tab = visitor(f"{opened.url}?__theme={look}")
    tab.click("#share .tool")
    tab.wait_for_selector(".share-qr")
    assert findings(tab) == []


def test_the_guests_password_page_is_accessible(opened, visitor, tunnel, look):  # noqa: F811
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


def test_the_owners_login_is_accessible_and_opens(locked, visitor, look):  # noqa: F811
    tab = visitor(f"{locked.url}?__theme={look}", "input[type=password]")
    assert findings(tab) == []
    tab.locator("input").nth(0).fill("me")
    tab.locator("input[type=password]").fill("secret")
    tab.get_by_role("button", name="Login").click()
    tab.wait_for_selector(READY)
