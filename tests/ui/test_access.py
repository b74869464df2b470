"""What an open page gives to whoever asks it directly: other sites, other apps, wrong calls."""

import json
import os
import re
import socket
import stat
from pathlib import Path

import httpx
import pytest
from support.scripted import ScriptedRunner

from medusa_chat.hosts import addresses, own_names
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import OTHER_SITE
from medusa_chat.ui.access.login_limit import LoginLimit, Throttle
from medusa_chat.ui.app import PageOptions, login_for, open_page

LOGIN = ("me", "local-secret")
READABLE = ("", "config", "theme.css", "gradio_api/info", "gradio_api/file=x", "gradio_api/app_id")
NEIGHBOUR = "http://127.0.0.1:9999"
CALLS = ("run/predict", "run/send", "api/predict", "queue/join", "call/send", "call/nothing")


def served(auth=None):
    session = Session(ScriptedRunner())
    session.submit(LoadRequest())
    page = open_page(session, PageOptions(auth=auth))
    yield page
    page.close()
    session.close()


page = pytest.fixture(scope="module")(lambda: (yield from served()))
locked = pytest.fixture(lambda: (yield from served(LOGIN)))


@pytest.mark.parametrize("path", READABLE)
def test_another_port_of_this_machine_reads_nothing(page, path):
    for headers in (
        {"origin": NEIGHBOUR},
        {"origin": "http://localhost:9999"},
        {"origin": "null"},
        {"sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"},
    ):
        answer = httpx.get(page.url + path, headers=headers)
        assert answer.status_code == 403, headers
        assert answer.text == OTHER_SITE


def test_a_link_on_another_site_opens_the_page(page):
    headers = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}
    assert httpx.get(page.url, headers=headers).status_code == 200


def test_the_page_takes_no_files_and_tells_nobody_how_it_is_used(page):
    for path in ("upload", "upload/", "process_recording", "vibe-edit", "component_server"):
        files = {"files": ("a.txt", b"x" * 100)}
        assert httpx.post(f"{page.url}gradio_api/{path}", files=files).status_code == 404
    for path in ("deep_link?session_hash=x", "monitoring", "profiling/traces"):
        assert httpx.get(f"{page.url}gradio_api/{path}").status_code == 404
    assert list(Path(os.environ["GRADIO_TEMP_DIR"]).rglob("*.txt")) == []


def test_gradios_files_lie_in_a_folder_of_the_pages_own(page):
    folder = Path(os.environ["GRADIO_TEMP_DIR"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 or os.name == "nt"
    stranger = Path(os.environ["GRADIO_TEMP_DIR"]).parent / "gradio" / "of-another-app.txt"
    stranger.parent.mkdir(exist_ok=True)
    stranger.write_text("secret of another app")
    try:
        answer = httpx.get(f"{page.url}gradio_api/file={stranger}")
        assert answer.status_code == 403 and "secret" not in answer.text
    finally:
        stranger.unlink()


def bodies(page) -> list[bytes]:
    """Calls of every wrong shape: Gradio alone answers several of them with a bare 500."""
    fns = page.blocks.fns
    send = next(i for i, fn in fns.items() if fn.api_name == "send")
    count = len(fns[send].inputs)
    calls = [
        *({"data": data, "fn_index": send} for data in ([], [1], [1] * 99, [{"a": 1}] * count)),
        *({"data": [], "fn_index": index} for index in (99999, -1, "x", None)),
        *({"data": 1}, {}, {"data": [], "fn_index": 0}),
        {"data": [None] * count, "fn_index": send, "event_data": "x", "trigger_id": "?"},
    ]
    raw = (b"", b"[]", b"null", b'"x"', b"{", b'{"data":' + b"[" * 50_000)
    return [*raw, *(json.dumps(call | {"session_hash": "s"}).encode() for call in calls)]


@pytest.mark.parametrize("path", CALLS)
def test_a_call_of_the_wrong_shape_gets_a_sentence(page, path):
    with httpx.Client(base_url=page.url, headers={"content-type": "application/json"}) as client:
        for body in bodies(page):
            answer = client.post(f"gradio_api/{path}", content=body)
            assert answer.status_code < 500, (body[:80], answer.text)
            assert answer.status_code != 400 or len(answer.text) > 20, answer.text


def attempt(client: httpx.Client, password: str, **headers: str) -> int:
    fields = {"username": LOGIN[0], "password": password}
    return client.post("login", data=fields, headers=headers).status_code


def test_strangers_with_made_up_addresses_cannot_lock_the_owner_out(locked):
    with httpx.Client(base_url=locked.url) as owner, httpx.Client(base_url=locked.url) as thief:
        for n in range(30):
            assert attempt(thief, "wrong", **{"x-forwarded-for": f"10.0.0.{n}"}) == 400
        assert attempt(thief, "wrong", **{"x-forwarded-for": "10.0.1.1"}) == 429
        assert attempt(owner, LOGIN[1]) == 200  # at this machine
        through_a_proxy = {"x-forwarded-for": "10.0.1.2"}
        assert attempt(owner, LOGIN[1], **through_a_proxy) == 200  # a browser that was here
        owner.cookies.clear()
        assert attempt(owner, LOGIN[1], **through_a_proxy) == 429


def test_a_mark_made_by_hand_makes_no_known_browser(locked):
    with httpx.Client(base_url=locked.url) as thief:
        for n in range(30):
            attempt(thief, "wrong", **{"x-forwarded-for": f"10.0.0.{n}"})
        for cookie in ("a.b", ".", "a", f"a.{'0' * 64}"):
            forged = {"x-forwarded-for": "10.0.1.1", "cookie": f"medusa-known={cookie}"}
            assert attempt(thief, "wrong", **forged) == 429


def test_own_mistakes_wait_a_minute_even_where_strangers_do_not_count():
    throttle = Throttle(clock=lambda: 0.0)
    for n in range(40):
        throttle.count(f"other {n}")
    assert throttle.is_shut("me") and not throttle.is_shut("me", is_stranger=False)
    for _ in range(5):
        throttle.count("me")
    assert throttle.is_shut("me", is_stranger=False)
    assert LoginLimit(None).throttle.is_shut("me") is False


def test_a_call_that_fails_is_one_short_line_without_escape_codes(page, capfd):
    fn = next(
        at
        for at, made in enumerate(httpx.get(f"{page.url}config").json()["dependencies"])
        if len(made["inputs"]) > 2
    )
    body = {"fn_index": fn, "session_hash": "x", "data": ["\x1b[2J\x1b[31m" + "no " * 100_000]}
    for _ in range(30):
        assert httpx.post(f"{page.url}gradio_api/run/predict", json=body).status_code >= 400
    said = capfd.readouterr().err
    assert "medusa-chat: a call of the page failed: " in said and "\x1b" not in said
    assert len(said) < 12_000 and "Traceback" not in said
    file = Path(re.search("its traceback is in (.*)", said)[1])
    written = file.read_text()
    assert all(sign.isprintable() or sign == "\n" for sign in written)
    assert written.startswith("Traceback") and 'File "' in written and len(written) < 25_000
    assert len(list(file.parent.glob(f"*{file.name}*"))) == 1


def test_nobody_is_logged_out_by_an_address(locked):
    with httpx.Client(base_url=locked.url) as client:
        assert client.post("login", data=dict(zip(("username", "password"), LOGIN, strict=True)))
        assert client.get("logout").status_code == 404
        assert client.get("config").status_code == 200


@pytest.mark.parametrize("behind", ["chat", "/chat"])
def test_a_path_of_a_proxy_may_lack_its_slash(behind):
    session = Session(ScriptedRunner())
    opened = open_page(session, PageOptions(root_path=behind))
    try:
        assert httpx.get(f"{opened.url}config").json()["root"].endswith("/chat")
    finally:
        opened.close()
        session.close()


def test_what_listens_everywhere_tells_its_addresses_and_asks_for_a_password(monkeypatch):
    monkeypatch.setattr(socket.socket, "getsockname", lambda self: ("192.0.2.7", 5))
    assert addresses("0.0.0.0", 7860) == ["http://192.0.2.7:7860/"]
    assert addresses("127.0.0.1", 7860) == addresses("192.0.2.7", 7860) == []
    assert login_for("127.0.0.1", None) is None and len(login_for("0.0.0.0", None)[1]) > 12
    assert {f"{socket.gethostname()}.lan", socket.gethostname()} <= set(own_names("0.0.0.0"))
