"""The public link without a browser: who comes in, with what, for how long."""

import asyncio
import contextlib
import json
import logging
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import segno
from support.http_tab import HttpTab
from support.scripted import ScriptedRunner
from support.waiting import wait_for

from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest, ModelInfo
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.session import Session
from medusa_chat.ui import app as page
from medusa_chat.ui.access import guard, login_limit, own_states
from medusa_chat.ui.access import password as passwords
from medusa_chat.ui.access import tunnel as tunnels
from medusa_chat.ui.access.login_limit import Throttle
from medusa_chat.ui.access.notices import HEADER
from medusa_chat.ui.access.password import COOKIE
from medusa_chat.ui.access.share import Share, ShareState, share_view
from medusa_chat.ui.access.tunnel import ShareError, Tunnel
from medusa_chat.ui.page.status import status_line

HOST = "abc123.gradio.live"


class FakeTunnel:
    """Makes an address at once; port: the local end; closed: how often it was ended."""

    def __init__(self, scheme: str = "https"):
        self.scheme, self.port, self.closed = scheme, 0, 0

    def __call__(self, port: int) -> Tunnel:
        self.port = port
        return Tunnel(f"{self.scheme}://{HOST}", self.close)

    def close(self) -> None:
        self.closed += 1


class Clock:
    now = 1_800_000_000.0

    def __call__(self) -> float:
        return self.now


# ---- the link ----


def test_a_link_has_a_password_a_key_and_an_end():
    clock, tunnel = Clock(), FakeTunnel()
    share = Share(lambda: 7, tunnel, clock)
    share.begin(8).join()
    link = share.link
    assert link.host == HOST and tunnel.port == 7
    assert re.fullmatch(r"[a-z2-9]{4}-[a-z2-9]{4}-[a-z2-9]{4}", link.password)
    assert len(link.key) >= 32 and link.key in link.address
    assert link.expires == clock.now + 8 * 3600
    clock.now += 8 * 3600
    assert share.link is None
    share.stop()


def test_every_link_is_another_one():
    share = Share(lambda: 7, FakeTunnel())
    share.begin(1).join()
    first = share.link
    share.begin(1).join()
    second = share.link
    assert not {first.password, first.key, first.secret} & {
        second.password,
        second.key,
        second.secret,
    }
    share.stop()


def test_stop_closes_the_tunnel_once():
    tunnel = FakeTunnel()
    share = Share(lambda: 7, tunnel)
    share.begin(1).join()
    share.stop()
    share.stop()
    assert share.link is None and share.state == ShareState() and tunnel.closed == 1


def test_a_link_that_comes_after_stop_is_closed_at_once():
    gate, tunnel = threading.Event(), FakeTunnel()

    def slow(port: int) -> Tunnel:
        gate.wait(240)
        return tunnel(port)

    share = Share(lambda: 7, slow)
    making = share.begin(1)
    assert share.state.status == "making"
    share.stop()
    gate.set()
    making.join(10)
    assert share.link is None and tunnel.closed == 1


@pytest.mark.parametrize("hours", [0, 2, -1, 1.5, "24", None, [1], {"a": 1}, True, 10**9])
def test_hours_are_one_of_the_choices(hours):
    with pytest.raises(UsageError, match="1, 8, 24, 72"):
        Share(lambda: 7, FakeTunnel()).begin(hours)


def test_a_tunnel_that_fails_is_one_plain_sentence():
    def offline(port: int) -> Tunnel:
        raise ShareError(tunnels.NO_INTERNET)

    share = Share(lambda: 7, offline)
    share.begin().join()
    assert share.state.status == "off" and share.state.message.startswith("No internet")
    assert page.share_lines(share) == [f"not shared: {tunnels.NO_INTERNET}"]


@pytest.mark.parametrize("fault", [httpx.ConnectError("no route"), httpx.ReadTimeout("slow")])
def test_without_internet_the_real_tunnel_says_so(monkeypatch, tmp_path, fault):
    def get(url: str, timeout: float) -> None:
        assert timeout <= 5
        raise fault

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(httpx, "get", get)
    with pytest.raises(ShareError, match="No internet"):
        tunnels.open_tunnel(7)
    assert not list(tmp_path.glob(".gradio"))


def test_another_program_in_the_tunnels_place_is_deleted_and_not_run(tmp_path):
    program = tmp_path / "frpc"
    program.write_bytes(b"something else")
    with pytest.raises(ShareError, match="deleted"):
        tunnels._refuse_another_program(program, "0" * 64)
    assert not program.exists()


def test_the_qr_code_is_the_link_that_needs_no_password():
    share = Share(lambda: 7, FakeTunnel())
    share.begin(1).join()
    view = share_view(share.state)
    same = segno.make(share.link.address, error="m", micro=False)
    assert view["qr"] == same.svg_data_uri(scale=4, border=3, dark="#16211c", light="#ffffff")
    assert view["address"] == f"https://{HOST}/?key={share.link.key}"
    share.stop()
    assert "password" not in share_view(share.state)


# ---- the throttle ----


def test_five_failures_a_minute_and_thirty_of_everybody():
    clock = Clock()
    throttle = Throttle(clock=clock)
    for _ in range(5):
        assert not throttle.is_shut("one")
        throttle.count("one")
    assert throttle.is_shut("one") and not throttle.is_shut("two")
    throttle.forgive("one")
    assert not throttle.is_shut("one")
    for number in range(26):
        throttle.count(f"other {number}")
    assert throttle.is_shut("two")
    clock.now += 61
    assert not throttle.is_shut("one")


# ---- the status, as a guest sees it ----


def test_a_guest_learns_the_model_and_nothing_of_the_folders():
    model = ModelInfo(
        *("/home/me/secret/vicuna", "llama", "fp16", "cpu", 7, 3, 2048, "auto", 16),
        tree_reason="from /home/me/secret/tree.json",
        memory_bytes=2**20,
        notes=("read from /home/me/secret",),
    )
    ready, failed = (
        ModelState("ready", model=model),
        ModelState("failed", message="/home/me is not here"),
    )
    assert "secret" in status_line(ready) and "/home/me" in status_line(failed)
    assert "vicuna" in status_line(ready, None, is_guest=True)
    assert [json.loads(status_line(failed, None, guest))["again"] for guest in (False, True)] == [
        *(True, False)
    ]
    for state in (ready, failed):
        assert "/home" not in status_line(state, 2**30, is_guest=True)


def test_a_long_name_keeps_its_end_in_the_bar_and_is_whole_in_the_reason():
    name = "/home/me/far/" + "long-" * 30 + "vicuna-7b"
    model = ModelInfo(
        *(name, "llama", "fp16", "cpu", 7, 3, 2048, "auto", 16),
        tree_reason="",
        memory_bytes=2**20,
    )
    _, shown, why = json.loads(status_line(ModelState("ready", model=model)))["facts"][0]
    assert shown.startswith("…") and shown.endswith("long-vicuna-7b") and len(shown) <= 36
    assert name in why
    near = replace(model, name="/home/me/far/vicuna-7b")
    assert json.loads(status_line(ModelState("ready", model=near)))["facts"][0][1] == "vicuna-7b"


# ---- the door, on the real page ----


def log_in(opened: page.Page) -> httpx.Client:
    """The owner's browser, at the page's own address."""
    httpx.post(f"{opened.url}login", data={"username": "me", "password": "local-secret"})
    token = next(iter(t for t, user in opened.blocks.app.tokens.items() if user == "me"))
    cookie = f"access-token-{opened.blocks.app.cookie_id}={token}"
    return httpx.Client(base_url=opened.url, headers={"cookie": cookie})


@pytest.fixture(scope="module")
def opened() -> Iterator[page.Page]:
    session = Session(ScriptedRunner(delay=0, prefill=0, steps=3))
    session.submit(LoadRequest())
    shown = page.open_page(session, page.PageOptions(auth=("me", "local-secret")))
    yield shown
    shown.close()
    session.close()


@pytest.fixture
def shared(opened) -> Iterator[tuple[page.Page, FakeTunnel]]:
    tunnel = FakeTunnel("https")
    opened.share._open = tunnel
    opened.share.begin(1).join()
    assert opened.share.link, opened.share.state
    yield opened, tunnel
    opened.share.stop()


def guest(tunnel: FakeTunnel, host: str = HOST) -> httpx.Client:
    """A browser at the far end of the tunnel."""
    headers = {"host": host, "accept": "text/html"}
    base = f"http://127.0.0.1:{tunnel.port}"
    return httpx.Client(base_url=base, headers=headers, timeout=30, transport=_retrying())


def _retrying() -> httpx.HTTPTransport:
    return httpx.HTTPTransport(retries=5)  # the port may be a moment late


def come_in(client: httpx.Client, password: str, **headers: str) -> httpx.Response:
    answer = client.post("/enter", data={"password": password}, headers=headers)
    if COOKIE in answer.headers.get("set-cookie", ""):
        cookie = answer.headers["set-cookie"].split(";")[0]  # Secure: httpx would hold it back
        client.headers["cookie"] = cookie
    return answer


EVERYTHING = (
    *("/", "/config", "/gradio_api/info", "/gradio_api/app_id", "/gradio_api/startup-events"),
    *("/theme.css", "/gradio_api/queue/data?session_hash=x", "/gradio_api/heartbeat/x"),
    *("/gradio_api/file=pyproject.toml", "/openapi.json", "/login_check", "/no/such/page", "/live"),
)


@pytest.mark.parametrize("path", EVERYTHING)
def test_nothing_of_the_page_is_seen_without_the_password(shared, path):
    with guest(shared[1]) as client:
        answer = client.get(path)
        assert answer.status_code == 401 and "Password" in answer.text
        assert "gradio" not in answer.text.lower()
        assert "frame-ancestors 'none'" in answer.headers["content-security-policy"]
        plain = client.get(path, headers={"accept": "*/*"})
        assert plain.status_code == 401 and "<" not in plain.text
    for path in ("/gradio_api/run/predict", "/gradio_api/queue/join", "/gradio_api/upload"):
        with guest(shared[1]) as client:
            assert client.post(path, json={}).status_code == 401


def test_the_spoken_password_opens_and_its_cookie_is_well_kept(shared):
    opened, tunnel = shared
    with guest(tunnel) as client:
        spoken = opened.share.link.password.upper().replace("-", " ")
        answer = come_in(client, spoken)
        assert answer.status_code == 303 and answer.headers["location"] == "/"
        cookie = answer.headers["set-cookie"].lower()
        for word in ("httponly", "secure", "samesite=lax", "path=/", "max-age="):
            assert word in cookie
        assert 3000 < int(re.search(r"max-age=(\d+)", cookie)[1]) <= 3600
        config = client.get("/config")
        assert config.status_code == 200 and config.json()["username"] != "me"
        assert client.get("/").status_code == 200
        for word in (opened.share.link.password, opened.share.link.key, "local-secret"):
            assert word not in config.text


def test_the_key_of_the_qr_code_opens_and_leaves_the_address(shared):
    opened, tunnel = shared
    parts = urlsplit(opened.share.link.address)
    with guest(tunnel) as client:
        answer = client.get(f"{parts.path}?{parts.query}")
        assert answer.status_code == 303 and answer.headers["location"] == "/"
        assert COOKIE in answer.headers["set-cookie"]
        assert answer.headers["cache-control"] == "no-store"
        assert client.get("/?key=wrong").status_code == 401


def test_many_wrong_passwords_make_everybody_wait_and_shut_nobody_out(shared, monkeypatch):
    """30 of them, from addresses that a stranger makes up, kept the right one from opening."""
    opened, tunnel = shared
    opened.guests._app.throttle = Throttle()
    waited, usual, a_moment = [], asyncio.sleep, 0.00123

    async def sleep(seconds: float, *args: Any) -> None:
        waited.append(seconds)
        await usual(seconds, *args)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(login_limit, "WAIT_SECONDS", a_moment)
    with guest(tunnel) as client:
        for n in range(30):
            answer = come_in(client, "wrong", **{"x-forwarded-for": f"9.9.9.9, 1.2.3.{n}"})
            assert answer.status_code == 401 and 'role="alert"' in answer.text
        assert a_moment not in waited
        anywhere = {"x-forwarded-for": "5.6.7.8"}
        assert come_in(client, "wrong", **anywhere).status_code == 401
        assert come_in(client, opened.share.link.password, **anywhere).status_code == 303
        assert waited.count(a_moment) == 2  # right and wrong ones take as long
        assert client.get(f"/?key={opened.share.link.key}", headers=anywhere).status_code == 303
        assert waited.count(a_moment) == 2
    opened.guests._app.throttle = Throttle()


def test_a_cookie_of_another_link_or_made_by_hand_is_worth_nothing(shared):
    opened, tunnel = shared
    with guest(tunnel) as client:
        come_in(client, opened.share.link.password)
        assert client.get("/config").status_code == 200
        good = client.headers["cookie"]
        for bad in (good[:-1] + ("0" if good[-1] != "0" else "1"), f"{COOKIE}=", f"{COOKIE}=a.b.c"):
            assert client.get("/config", headers={"cookie": bad}).status_code == 401
        opened.share.begin(1).join()
        assert client.get("/config").status_code == 401


@pytest.mark.parametrize("host", ["other.gradio.live", "127.0.0.1", "localhost", f"x{HOST}", ""])
def test_only_the_links_own_host_comes_through(shared, host):
    with guest(shared[1], host) as client:
        assert client.get("/").status_code in (400, 410)
        key = shared[0].share.link.key
        assert client.get(f"/?key={key}").status_code in (400, 410)


def test_the_links_host_is_a_stranger_at_the_pages_own_address(shared):
    opened, _ = shared
    assert httpx.get(opened.url, headers={"host": HOST}).status_code == 403


def test_a_post_from_another_site_is_refused_with_and_without_the_cookie(shared):
    opened, tunnel = shared
    evil = {"origin": "https://evil.com"}
    with guest(tunnel) as client:
        assert come_in(client, opened.share.link.password, **evil).status_code == 403
        own = {"origin": f"https://{HOST}"}
        assert come_in(client, opened.share.link.password, **own).status_code == 303
        path = "/gradio_api/run/predict"
        assert client.post(path, headers=evil).status_code == 403
        with contextlib.suppress(httpx.TransportError):  # refused before all of it was sent
            big = client.post(path, content=b"x" * 5_000_000)
            assert big.status_code == 413


@pytest.mark.parametrize("path", ["/login", "/logout", "/token", "/monitoring", "/gradio_api/runs"])
def test_what_is_the_owners_is_closed_to_guests(shared, path):
    opened, tunnel = shared
    with guest(tunnel) as client:
        come_in(client, opened.share.link.password)
        assert client.get(path).status_code == 404
        assert client.get(f"{path}/").status_code == 404


def test_after_stop_everything_is_refused_in_one_sentence(shared):
    opened, tunnel = shared
    with guest(tunnel) as client:
        come_in(client, opened.share.link.password)
        assert client.get("/config").status_code == 200
        opened.share.stop()
        for path in EVERYTHING:
            answer = client.get(path)
            assert answer.status_code == 410 and "has ended" in answer.text
        assert come_in(client, "x").status_code == 410
    assert tunnel.closed == 1


def test_connections_that_ask_for_nothing_shut_nobody_out(shared, monkeypatch):
    """1,100 of them used up all files of the process, the owner's page too."""
    opened, tunnel = shared
    monkeypatch.setattr(guard, "MAX_CONNECTIONS", 20)
    head = f"POST /enter HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 50\r\n".encode()
    with contextlib.ExitStack() as stack:
        for n in range(60):  # silent ones, ones amid their headers, ones amid their body
            silent = socket.create_connection(("127.0.0.1", tunnel.port))
            stack.enter_context(silent).sendall((b"", head, head + b"\r\nhalf")[n % 3])
        with guest(tunnel) as client:
            assert come_in(client, opened.share.link.password).status_code == 303
            assert len(opened.guests._server.server_state.connections) <= 20


def test_a_body_that_does_not_come_is_not_waited_for(shared, monkeypatch):
    opened, tunnel = shared
    monkeypatch.setattr(passwords, "BODY_SECONDS", 0.1)
    monkeypatch.setattr(guard, "BODY_SECONDS", 0.1)
    with guest(tunnel) as client:
        come_in(client, opened.share.link.password)
        cookie = client.headers["cookie"]
    own = urlsplit(opened.url).netloc
    for port, host, path in (
        (tunnel.port, HOST, "/enter"),
        (tunnel.port, HOST, "/gradio_api/run/predict"),
        (int(own.partition(":")[2]), own, "/login"),
    ):
        lines = (f"POST {path} HTTP/1.1", f"Host: {host}", f"Cookie: {cookie}")
        asked = "\r\n".join((*lines, "Content-Length: 50", "", "half of it"))
        with socket.create_connection(("127.0.0.1", port), timeout=240) as slow:
            slow.sendall(asked.encode())
            answer = b"".join(iter(lambda: slow.recv(4096), b""))  # until it is closed
        assert answer.startswith(b"HTTP/1.1 408") and b"too long" in answer, path


def test_who_is_not_logged_in_sends_no_large_body(opened):
    with httpx.Client(base_url=opened.url) as stranger, log_in(opened) as owner:
        large = {"content": b"x" * 65 * 1024}
        assert stranger.post("/gradio_api/run/predict", **large).status_code == 413
        assert owner.post("/gradio_api/run/predict", **large).status_code == 422


def test_a_stream_to_a_guest_ends_with_the_link(shared):
    opened, tunnel = shared
    with guest(tunnel) as client:
        come_in(client, opened.share.link.password)
        with contextlib.suppress(httpx.RemoteProtocolError):
            with client.stream("GET", "/gradio_api/heartbeat/abc") as stream:
                assert stream.status_code == 200
                opened.share.stop()
                stream.read()  # by itself it would last for ever


def test_an_answer_that_the_end_of_the_link_cuts_short_is_no_error(opened, monkeypatch):
    """It ended with a traceback in the terminal: OSError: the share link has ended."""
    opened.share._open = tunnel = FakeTunnel()
    logged: list[logging.LogRecord] = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "handle", logged.append)

    async def ending(scope, receive, send):
        if scope["path"] == "/begun":
            await send({"type": "http.response.start", "status": 200, "headers": []})
        opened.share.stop()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    monkeypatch.setattr(opened.guests._app, "app", ending)
    for path, status in (("/begun", 200), ("/not-begun", 410)):
        opened.share.begin(1).join()
        with guest(tunnel) as client:
            come_in(client, opened.share.link.password)
            assert client.get(path).status_code == status
    assert logged == []


def fn_index(config: dict, name: str) -> int:
    """The event of a custom name, as a client would find it."""
    return next(d["id"] for d in config["dependencies"] if name in str(d["targets"]))


def test_only_the_owner_may_share_and_see_the_link(shared):
    opened, tunnel = shared
    link = opened.share.link
    with guest(tunnel) as client:
        come_in(client, link.password)
        config = client.get("/config").json()
        for name in ("begin_share", "end_share", "refresh"):
            body = {"fn_index": fn_index(config, name), "data": [], "session_hash": "s"}
            body["event_data"] = {"hours": 1}
            for extra in ({}, {"x-medusa-guest": "0"}):
                answer = client.post("/gradio_api/run/predict", json=body, headers=extra)
                assert answer.status_code == 200, answer.text
                assert answer.json()["data"][-1] == ""
                assert link.password not in answer.text
        assert opened.share.link is link
    with log_in(opened) as owner:
        body |= {"fn_index": fn_index(config, "refresh"), "session_hash": "of the owner"}
        answer = owner.post("gradio_api/run/predict", json=body)
        assert link.password in answer.text
        # what lets guests past the login does not make an owner at the page's own address
        ticket = opened.guests._app.ticket
        answer = owner.post("gradio_api/run/predict", json=body, headers={"cookie": ticket})
        assert answer.json()["data"][-1] == ""


def call(client: httpx.Client, opened: page.Page, name: str, tab: str, *data) -> httpx.Response:
    """An event of the chat, as the browser tab of that session hash posts it."""
    fns = opened.blocks.fns.values()
    fn = next(fn for fn in fns if name in (fn.api_name, *(event for _, event in fn.targets)))
    values = [*data, *([None] * len(fn.inputs))][: len(fn.inputs)]
    body = {"fn_index": fn._id, "data": values, "session_hash": tab}
    return client.post("/gradio_api/run/predict", json=body)


def test_a_browser_that_comes_in_again_is_the_same_guest(shared):
    opened, tunnel = shared
    with guest(tunnel) as client, guest(tunnel) as other:
        come_in(client, opened.share.link.password)
        mine = call(client, opened, "come", "tab1").text
        again = client.get(f"/?key={opened.share.link.key}")
        assert client.headers["cookie"] == again.headers["set-cookie"].split(";")[0]
        come_in(other, opened.share.link.password)
        assert other.headers["cookie"] != client.headers["cookie"]
        id = re.search(r'conversation\\":\\"([^"\\]+)', mine)[1]
        known = json.dumps({"last": id})
        assert id in call(client, opened, "come", "tab2", None, known).text
        assert id not in call(other, opened, "come", "tab3", None, known).text


def test_the_name_and_the_key_of_a_tab_are_worth_nothing_to_another_visitor(shared):
    opened, tunnel = shared
    with guest(tunnel) as client, guest(tunnel) as other, log_in(opened) as owner:
        come_in(client, opened.share.link.password)
        come_in(other, opened.share.link.password)
        visitors = {"owners": owner, "guests": client, "others": other}
        for tab, visitor in visitors.items():
            answer = call(visitor, opened, "come", tab)
            key = re.search(r'key\\":\\"([^"\\]+)', answer.text)[1]
            for name, stranger in visitors.items():
                status = 200 if name == tab else 403
                assert call(stranger, opened, "tick", tab).status_code == status, (tab, name)
                live = stranger.get("/live", headers={"x-medusa-tab": key})
                assert live.status_code == (200 if name == tab else 404)


def test_a_guest_has_so_many_tabs_and_what_is_closed_gives_room(shared, monkeypatch):
    opened, tunnel = shared
    states = opened.blocks.state_holder
    monkeypatch.setattr(own_states, "MAX_OF_ONE_GUEST", 2)
    with guest(tunnel) as client, guest(tunnel) as other, log_in(opened) as owner:
        come_in(client, opened.share.link.password)
        come_in(other, opened.share.link.password)
        first, second, third = (HttpTab(client) for _ in range(3))
        with first.connected():
            assert first.tick().status_code == second.tick().status_code == 200
            refused = third.tick()
            assert refused.status_code == 429 and "close one" in refused.text
            assert "close%20one" in refused.headers[HEADER]
            assert HttpTab(other).tick().status_code == HttpTab(owner).tick().status_code == 200
        wait_for(lambda: states.session_data[first.name].is_closed)
        assert third.tick().status_code == second.tick().status_code == 200
        assert first.name not in states and first.tick().status_code == 409


def test_all_guests_have_so_many_tabs_and_the_owner_has_more(shared, monkeypatch):
    opened, tunnel = shared
    monkeypatch.setattr(own_states, "MAX_GUEST_STATES", 2)
    with guest(tunnel) as client, guest(tunnel) as other, log_in(opened) as owner:
        for one in (client, other):
            come_in(one, opened.share.link.password)
            assert HttpTab(one).tick().status_code == 200
        assert HttpTab(other).tick().status_code == 429
        assert [HttpTab(owner).tick().status_code for _ in range(3)] == [200] * 3
        monkeypatch.setattr(own_states, "CLOSED_SECONDS", 0.0)  # the longest without a sign goes
        assert HttpTab(other).tick().status_code == 200


def test_what_is_kept_of_guests_tabs_goes_with_their_link(shared):
    opened, tunnel = shared
    states = opened.blocks.state_holder
    with guest(tunnel) as client, log_in(opened) as owner:
        come_in(client, opened.share.link.password)
        theirs, own = HttpTab(client), HttpTab(owner)
        theirs.tick(), own.tick()
        opened.share.stop()
        assert theirs.name not in states and own.name in states


def test_the_local_login_is_slowed_down_too(opened):
    wrong = {"username": "me", "password": "wrong"}
    right = {"username": "me", "password": "local-secret"}
    with httpx.Client(base_url=opened.url) as client:
        for _ in range(6):
            assert client.post("login", data=right).status_code == 200
        for _ in range(5):
            assert client.post("login", data=wrong).status_code == 400
        answer = client.post("login", data=right)
        assert answer.status_code == 429 and "minute" in answer.text
