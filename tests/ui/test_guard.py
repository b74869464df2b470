"""The guard: who may ask, how much, and what every answer carries."""

import asyncio
import json
from collections.abc import Iterable
from typing import Any
from urllib.parse import unquote

import pytest

from medusa_chat.hosts import name_of
from medusa_chat.ui.access import guard, notices
from medusa_chat.ui.access.guard import HEADERS, Guard

LOCAL = {"host": "127.0.0.1:7860"}


async def app(scope: dict, receive: Any, send: Any) -> None:
    """Answers with the number of body bytes it got."""
    total, more = 0, True
    while more:
        message = await receive()
        total += len(message.get("body", b""))
        more = message.get("more_body", False)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(total).encode()})


def ask(
    made: Guard,
    method: str = "GET",
    headers: dict[str, str] | Iterable[tuple[str, str]] = LOCAL,
    chunks: Iterable[bytes] = (b"",),
    path: str = "/",
) -> tuple[int, dict[str, str], str]:
    """(status, headers, body) of one request whose body comes in chunks."""
    pairs = headers.items() if isinstance(headers, dict) else headers
    raw = [(name.encode(), value.encode()) for name, value in pairs]
    scope = {"type": "http", "method": method, "path": path, "headers": raw}
    chunks, sent = list(chunks), []

    async def receive() -> dict:
        chunk = chunks.pop(0)
        return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

    async def send(message: dict) -> None:
        sent.append(message)

    asyncio.run(made(scope, receive, send))
    found = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], found, b"".join(m.get("body", b"") for m in sent).decode()


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost", "[::1]:7860", "LOCALHOST:1"])
def test_local_hosts_pass(host):
    assert ask(Guard(app), headers={"host": host})[0] == 200


@pytest.mark.parametrize(
    "host",
    ["evil.com", "127.0.0.1.nip.io:7860", "localhost.evil.com", "10.0.0.1", "x.gradio.live", ""]
    + ["[::1", "127.0.0.1@evil.com:7860x"],
)
def test_other_hosts_are_refused(host):
    status, headers, body = ask(Guard(app), headers={"host": host})
    assert status == 403 and "host name" in body
    assert headers["content-security-policy"]


def test_a_request_without_one_host_is_refused():
    assert ask(Guard(app), headers={})[0] == 403
    twice = [("host", "127.0.0.1"), ("host", "evil.com")]
    assert ask(Guard(app), headers=twice)[0] == 403


def test_given_hosts_and_addresses_pass_only_when_asked_for():
    assert ask(Guard(app, ["box.lan"]), headers={"host": "box.lan:80"})[0] == 200
    assert ask(Guard(app, allow_addresses=True), headers={"host": "10.0.0.1:7860"})[0] == 200
    assert ask(Guard(app, allow_addresses=True), headers={"host": "evil.com"})[0] == 403


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "http://127.0.0.1:7860"}, 200),
        ({}, 200),  # no browser
        ({"origin": "http://127.0.0.1:9999"}, 403),
        ({"origin": "https://evil.com"}, 403),
        ({"origin": "null"}, 403),
        ({"origin": "http://["}, 403),
        ({"origin": "http://[evil.com]"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "same-origin", "origin": "http://127.0.0.1:7860"}, 200),
    ],
)
def test_a_post_comes_from_the_page_itself(headers, status):
    assert ask(Guard(app), "POST", LOCAL | headers)[0] == status


def test_a_proxy_in_front_is_an_origin():
    guard = Guard(app, origins=["chat.example.com"])
    assert ask(guard, "POST", LOCAL | {"origin": "https://chat.example.com"})[0] == 200
    assert ask(guard, headers={"host": "chat.example.com"})[0] == 200


def test_large_bodies_are_refused_by_header_and_by_count(monkeypatch):
    monkeypatch.setattr("medusa_chat.ui.access.guard.MAX_BODY", 1000)
    guard = Guard(app)
    assert ask(guard, "POST", LOCAL | {"content-length": "1001"}, [b"x"])[0] == 413
    assert ask(guard, "POST", LOCAL | {"content-length": "-1"}, [b"x"])[0] == 413
    assert ask(guard, "POST", LOCAL | {"content-length": "10"}, [b"x" * 600] * 2)[0] == 413
    assert ask(guard, "POST", LOCAL, [b"x" * 600, b"y" * 400])[2] == "1000"


@pytest.mark.parametrize("path", ["/chats", "/behind/chats"])
def test_a_file_may_be_larger_whether_or_not_a_proxy_leaves_its_prefix_on(monkeypatch, path):
    monkeypatch.setattr("medusa_chat.ui.access.guard.MAX_BODY", 1000)
    guard = Guard(app, prefix="/behind")
    assert ask(guard, "POST", LOCAL, [b"x" * 2000], path=path)[0] == 200


def test_every_answer_carries_the_security_headers():
    _, headers, _ = ask(Guard(app))
    assert {name.lower(): value for name, value in HEADERS.items()} == headers
    assert "frame-ancestors 'none'" in headers["content-security-policy"]
    assert "img-src data: blob:" in headers["content-security-policy"]


def test_a_websocket_from_elsewhere_is_closed():
    sent = []

    async def send(message: dict) -> None:
        sent.append(message)

    raw = [(b"host", b"127.0.0.1:7860"), (b"origin", b"https://evil.com")]
    asyncio.run(Guard(app)({"type": "websocket", "path": "/", "headers": raw}, None, send))
    assert sent[0]["type"] == "websocket.close"


def test_names_are_read_from_hosts():
    assert [name_of(h) for h in ("A.b:80", "[::1]:80", "x.", "")] == ["a.b", "::1", "x", ""]


def test_what_gradios_queue_is_begun_with_is_nobodys():
    asked = []

    async def remember(scope: dict, receive: Any, send: Any) -> None:
        asked.append(guard.ASKER.get())
        await app(scope, receive, send)

    for path in ("/gradio_api/startup-events", "/config"):
        ask(Guard(remember), headers=LOCAL, path=path)
    assert asked == [None, guard.OWNER]


def test_what_an_event_tells_goes_to_its_browser_and_is_short():
    async def tell(scope: dict, receive: Any, send: Any) -> None:
        for number in range(20):
            notices.inform(f"{number} \N{SNOWMAN}\n" + "x" * 2000)
        await app(scope, receive, send)

    _, headers, _ = ask(Guard(tell))
    found = json.loads(unquote(headers[notices.HEADER]))
    assert [text.split("\n")[0] for _, text, _ in found] == [
        f"{number} \N{SNOWMAN}" for number in range(len(found))
    ]
    assert 2 < len(found) < 20 and found[0][0] == "info"
    assert len(headers[notices.HEADER]) <= notices.MOST
    assert notices.HEADER not in ask(Guard(app))[1]
