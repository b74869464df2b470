"""The owner's login: what counts as a failure, and whose it is."""

import httpx
import pytest
from support.scripted import ScriptedRunner

from medusa_chat.runtime.session import Session
from medusa_chat.ui.app import PageOptions, open_page

LOGIN = ("me", "local-secret")


@pytest.fixture(scope="module")
def page():
    session = Session(ScriptedRunner())
    opened = open_page(session, PageOptions(auth=LOGIN))
    yield opened
    opened.close()
    session.close()


def attempt(page, password: str, **headers: str) -> int:
    """A login without cookies, as a script's."""
    fields = {"username": LOGIN[0], "password": password}
    return httpx.post(f"{page.url}login", data=fields, headers=headers).status_code


def test_right_passwords_are_not_counted(page):
    assert {attempt(page, LOGIN[1]) for _ in range(7)} == {200}


def test_a_made_up_address_of_this_machine_does_not_lock_the_owner_out(page):
    made_up = {"x-forwarded-for": "127.0.0.1"}
    assert [attempt(page, "wrong", **made_up) for _ in range(6)] == [*[400] * 5, 429]
    assert attempt(page, LOGIN[1]) == 200
