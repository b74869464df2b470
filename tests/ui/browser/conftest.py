"""What the tests in a browser start from."""

from collections.abc import Iterator
from typing import Any

import pytest
from support.page import browser, open_tab, people, quick, runner, served  # noqa: F401
from support.shell import guest_browser, kept, opened, resident, tunnel, visitor  # noqa: F401

STATE = """() => ({
  address: location.href,
  box: document.querySelector('#box textarea')?.value,
  conversation: document.querySelector('#history')?.innerText,
  waiting: document.querySelector('.next-line')?.innerText,
  isStopVisible: document.querySelector('#stop')?.checkVisibility(),
  notices: document.querySelector('#notices')?.innerText,
  list: [...document.querySelectorAll('.chat-row-title')].map(node => node.textContent),
  compared: document.querySelector('.compare-status')?.innerText,
})"""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    """What the tabs show where a test has failed: a race may not come again."""
    report = yield
    if report.when == "call" and report.failed:
        for person in getattr(item, "funcargs", {}).get("people", {}).values():
            for tab in person.context.pages:
                report.sections.append(("A tab", str(tab.evaluate(STATE))))
    return report
