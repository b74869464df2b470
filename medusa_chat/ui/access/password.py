"""PasswordGate: the password and the cookie that guests of a shared link need."""

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from html import escape
from urllib.parse import parse_qs, urlsplit

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.paths import asset
from medusa_chat.ui.access.guard import (
    BODY_SECONDS,
    GUEST,
    GUEST_HEADER,
    TOO_SLOW,
    guest_named,
    host_of,
    with_headers,
)
from medusa_chat.ui.access.login_limit import SLOW_DOWN, Throttle, WaitingRoom
from medusa_chat.ui.access.share import Link, Share

COOKIE = "medusa-share"
MAX_FORM = 4096
LOOK_SECONDS = 0.5
CLOSED_PATHS = ("login", "logout", "token", "monitoring", "runs")  # of the owner, not of guests
OUR_HEADERS = ("x-forwarded-host", "x-forwarded-proto", "x-gradio-server", GUEST_HEADER)
ENDED = "This link has ended. Ask the person who gave it to you for a new one."
WRONG = "That is not the password of this link. Check it and try again."


class PasswordGate:
    """ASGI app on the port for guests, before the page's own app.

    Nothing that arrives here is the owner's, whatever its headers say. root_path: the path the
    page has behind the owner's proxy; guests come past that proxy. ticket: a cookie that lets
    guests past Gradio's own login, which asks for the owner's password.
    """

    def __init__(
        self, app: ASGIApp, share: Share, *, root_path: str = "", ticket: str = ""
    ) -> None:
        self.app = app
        self.share = share
        self.root_path = root_path.rstrip("/")
        self.ticket = ticket
        self.throttle = Throttle()
        self.room = WaitingRoom()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        link = self.share.link
        host = Headers(scope=scope).getlist("host")
        if link is None or [name.lower() for name in host] != [link.host]:
            await PlainTextResponse(ENDED, 410)(scope, receive, with_headers(send))
        elif (answer := await self._answer(link, Request(scope, receive))) is not None:
            answer.headers["Cache-Control"] = "no-store"
            answer.headers["Connection"] = "close"  # what is left of a body is not waited for
            await answer(scope, receive, with_headers(send))
        else:
            await self._pass_on(link, scope, receive, send)

    async def _answer(self, link: Link, request: Request) -> Response | None:
        """The response of the password check itself; None lets the request pass."""
        path = self._inside(request.url.path)
        if path == "/enter" and request.method == "POST":
            return await self._enter(link, request)
        if path == "/" and request.method == "GET" and "key" in request.query_params:
            return await self._try(link, request, request.query_params["key"])
        if not _is_signed(link, request.cookies.get(COOKIE, "")):
            wants_page = "text/html" in request.headers.get("accept", "")
            return form() if wants_page else PlainTextResponse("The password first.", 401)
        if path.rstrip("/").rpartition("/")[2] in CLOSED_PATHS:
            return PlainTextResponse("Not for guests.", 404)
        return None

    async def _enter(self, link: Link, request: Request) -> Response:
        body = b""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for chunk in request.stream():
                    body += chunk
                    if len(body) > MAX_FORM:
                        return PlainTextResponse("the request is too large", 413)
        except (TimeoutError, ClientDisconnect):
            return PlainTextResponse(TOO_SLOW, 408)
        origin = request.headers.get("origin")
        if origin is not None and host_of(origin) != link.host:
            return PlainTextResponse("a request from another site is not allowed", 403)
        fields = parse_qs(body.decode("utf-8", "replace"))
        return await self._try(link, request, fields.get("password", [""])[0])

    async def _try(self, link: Link, request: Request, word: str) -> Response:
        """Let in who has the password or the key. After many wrong ones everybody waits a moment,
        but for the key, which cannot be guessed; the right one opens all the same: strangers
        cannot lock others out, and with the server's few connections they guess slowly."""
        address = _address(request)
        is_key = _same(word, link.key)
        if not is_key and self.throttle.is_shut(address) and not await self.room.passed(address):
            return form(SLOW_DOWN, 429)
        if not (is_key or _same(_plain(word), _plain(link.password))):
            self.throttle.count(address)
            return form(WRONG, 401)
        answer = RedirectResponse(f"{self.root_path}/", 303)
        known = request.cookies.get(COOKIE, "")  # who comes again stays the same guest
        fresh = _signed(link, f"{int(link.expires)}.{secrets.token_urlsafe(12)}")
        answer.set_cookie(
            COOKIE,
            known if _is_signed(link, known) else fresh,
            max_age=max(0, int(link.expires - time.time())),
            httponly=True,
            secure=link.url.startswith("https:"),
            samesite="lax",
        )
        return answer

    async def _pass_on(self, link: Link, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a guest's request on. Where the link ends meanwhile, so does the answer."""
        inside, sending = self._as_guest(scope, link), self._while_open(link, send)
        try:
            await self.app(inside, self._until_end(link, receive), sending)
        except Exception:
            if self.share.link is link:
                raise
        if self.share.link is not link:  # an answer that is not complete is logged as an error
            with contextlib.suppress(Exception):  # it has begun
                await PlainTextResponse(ENDED, 410)(scope, receive, with_headers(send))
            with contextlib.suppress(Exception):  # it is complete
                await send({"type": "http.response.body"})

    def _until_end(self, link: Link, receive: Receive) -> Receive:
        """A guest's `receive`, which brings a disconnect once the link has ended."""

        async def receiving() -> Message:
            coming = asyncio.ensure_future(receive())
            try:
                while self.share.link is link:
                    if (await asyncio.wait({coming}, timeout=LOOK_SECONDS))[0]:
                        return coming.result()
                return {"type": "http.disconnect"}
            finally:
                coming.cancel()

        return receiving

    def _while_open(self, link: Link, send: Send) -> Send:
        """A guest's `send`, which raises OSError once the link has ended."""

        async def sending(message: Message) -> None:
            if self.share.link is not link:
                raise OSError("the share link has ended")
            await send(message)

        return sending

    def _as_guest(self, scope: Scope, link: Link) -> Scope:
        """The request as the page gets it: marked, and without headers only a proxy may set."""
        ours = {name.encode() for name in OUR_HEADERS}
        headers = [(name, value) for name, value in scope["headers"] if name not in ours]
        guest = _name_in(Request(scope).cookies[COOKIE])
        headers.append((GUEST_HEADER.encode(), guest.encode()))
        headers.append((b"x-forwarded-proto", urlsplit(link.url).scheme.encode()))
        if self.ticket:
            cookies = [value for name, value in headers if name == b"cookie"]
            headers = [pair for pair in headers if pair[0] != b"cookie"]
            headers.append((b"cookie", b"; ".join([*cookies, self.ticket.encode()])))
        path = self._inside(scope["path"])
        marks = {"path": path, "raw_path": path.encode(), GUEST: guest_named(guest)}
        return {**scope, "headers": headers, **marks}

    def _inside(self, path: str) -> str:
        """The path without the owner's proxy's part of it."""
        if self.root_path and path.startswith(f"{self.root_path}/"):
            return path[len(self.root_path) :]
        return path


def form(line: str = "", status: int = 401) -> HTMLResponse:
    """The page that asks for the password; it needs no script."""
    page = asset("html", "door.html").read_text(encoding="utf-8")
    alert = f'<p role="alert" class="wrong">{escape(line)}</p>' if line else ""
    return HTMLResponse(page.replace("<!--line-->", alert), status)


def _address(request: Request) -> str:
    """Who asks: what the tunnel's own last proxy saw, all else can be made up."""
    forwarded = request.headers.get("x-forwarded-for", "").rpartition(",")[2].strip()
    return forwarded[:64] or (request.client.host if request.client else "")


def _plain(word: str) -> str:
    """The password as it may be typed: spaces, dashes and capitals do not matter."""
    return "".join(word.lower().split()).replace("-", "")


def _same(one: str, other: str) -> bool:
    return hmac.compare_digest(one.encode("utf-8", "replace"), other.encode())


def _signed(link: Link, claim: str) -> str:
    mark = hmac.new(link.secret, f"{link.host}|{claim}".encode(), hashlib.sha256).hexdigest()
    return f"{claim}.{mark}"


def _is_signed(link: Link, cookie: str) -> bool:
    claim, _, _ = cookie.rpartition(".")
    return _same(cookie, _signed(link, claim))


def _name_in(cookie: str) -> str:
    """The guest that a signed cookie names."""
    return cookie.split(".")[1]
