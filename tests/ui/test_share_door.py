"""What the password gate lets through of a guest's request."""

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.testclient import TestClient

from medusa_chat.ui.access.password import PasswordGate
from medusa_chat.ui.access.share import Share
from medusa_chat.ui.access.tunnel import Tunnel

LINK = "https://abc123.gradio.live"


async def page(scope, receive, send):
    """Answers with the headers that it got."""
    await JSONResponse(dict(Request(scope).headers))(scope, receive, send)


@pytest.fixture
def door():
    """A browser of somebody who may try the password, and the link."""
    share = Share(lambda: 7, lambda port: Tunnel(LINK, lambda: None))
    share.begin(1).join()
    gate = PasswordGate(page, share)
    yield TestClient(gate, base_url=LINK, follow_redirects=False), share.link
    share.stop()


@pytest.fixture
def guest(door):
    client, link = door
    assert client.post("/enter", data={"password": link.password}).status_code == 303
    return client


def test_a_strangers_form_is_small(door):
    assert door[0].post("/enter", data={"password": "x" * 5000}).status_code == 413


@pytest.mark.parametrize("origin", ["http://[", "http://[evil.com]", "https://evil.com", "null"])
def test_a_strangers_form_is_of_the_link_itself(door, origin):
    client, link = door
    sent = client.post("/enter", data={"password": link.password}, headers={"origin": origin})
    assert sent.status_code == 403


@pytest.mark.parametrize("name", ["x-forwarded-host", "x-forwarded-proto", "x-gradio-server"])
def test_a_guests_headers_do_not_say_where_the_page_is(guest, name):
    assert "evil" not in guest.get("/config", headers={name: "evil.example"}).text


def test_runs_are_the_owners(guest):
    answer = guest.get("/runs")
    assert answer.status_code == 404 and answer.text == "Not for guests."
