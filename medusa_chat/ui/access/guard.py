"""Guard: what reaches the page, and how: Host, Origin, size, connections, security headers."""

import asyncio
import logging
import re
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.hosts import Hosts, name_of
from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.access.notices import HEADER, NOTICES, told

# Gradio 6.31 runs inline scripts and compiles templates: escaping stays the first defence.
# No pictures from here: the page's own are data, and one that a model writes would ask for /logout.
POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; "
    "style-src 'self' 'unsafe-inline'; img-src data: blob:; font-src 'self' data:; "
    "media-src blob:; connect-src 'self'; worker-src 'self' blob:; frame-src 'none'; "
    "object-src 'none'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
MAX_CONNECTIONS = 200  # a browser holds up to six
FILES = 8192  # uvicorn's backlog is 2,048
OWNER = "owner"  # who asks, where no guest does; and the scope of what is the owner's
GUEST = "medusa_chat.guest"  # in a request's scope: which guest asks; also their name for Gradio
GUEST_HEADER = "x-medusa-guest"  # the same where only headers arrive
# Who asks, while a request is answered; None elsewhere, as in the thread of Gradio's queue.
ASKER: ContextVar[str | None] = ContextVar("asker", default=None)
MAX_BODY = 4 * 1024 * 1024
CHATS = "/chats"  # takes and gives the file of all conversations
MAX_FILE = 64 * 1024 * 1024  # of a body there
ATTACHMENTS = "/attachments"  # takes a PDF file, gives its text
LARGEST = {CHATS: MAX_FILE, ATTACHMENTS: 33 * 1024 * 1024}  # of a body of the owner's
MAX_STRANGERS_BODY = 64 * 1024  # before the login, where the page has one
BODY_SECONDS = 20.0  # for a body to arrive
TOO_SLOW = "the request took too long to arrive: send it again"
READING = ("GET", "HEAD", "OPTIONS")
OTHER_SITE = "a request from another site is not allowed"
MISSHAPEN = "this call does not fit the page: load the page again"
# What Gradio offers and the page does not use: it takes files, fetches addresses, logs out, tells
# how it is used, or queues events, and keeps for good what nobody fetches of those.
CLOSED = re.compile(
    r"/(upload|upload_progress|deep_link|process_recording|component_server|stream|logout|"
    r"queue|call|cancel|reset|(undo-)?vibe-[a-z-]+|proxy=.*|run-history|dev/reload|"
    r"monitoring|profiling)(/|$)"
)


class Guard:
    """ASGI middleware that answers 403, 404, 408 and 413 before Gradio sees a request.

    hosts: names allowed in Host beside the local ones, without a port. allow_addresses: let in
    every bare IP address, which no page can rebind; for a server that listens on all interfaces.
    origins: hosts of a proxy in front, allowed in Origin. api: what answers under /v1
    (server/app.py), behind the prefix of a proxy; for no guest. Guests of a shared link come
    through the password gate, which has checked their Host.
    """

    def __init__(
        self,
        app: ASGIApp,
        hosts: Iterable[str] = (),
        *,
        allow_addresses: bool = False,
        origins: Iterable[str] = (),
        api: ASGIApp | None = None,
        prefix: str = "",
    ) -> None:
        self.app, self.api, self.prefix = app, api, prefix
        self.origins = {origin.lower() for origin in origins}
        named = (name_of(origin) for origin in self.origins)
        self.hosts = Hosts((*hosts, *named), allows_addresses=allow_addresses)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            return await self.app(scope, receive, send)
        if self.api is not None and GUEST not in scope:
            path = scope["path"].removeprefix(self.prefix)
            if path.startswith("/v1/"):  # which has checks of its own
                return await self.api({**scope, "path": path, "root_path": ""}, receive, send)
        is_startup = scope["path"].endswith("/startup-events")  # Gradio's queue keeps its context
        ASKER.set(None if is_startup else scope.get(GUEST, OWNER))
        NOTICES.set(None if is_startup else [])
        if reason := self.refusal(scope):
            await self._refuse(scope, receive, send, 403, reason)
        elif CLOSED.search(scope["path"]):
            await self._refuse(scope, receive, send, 404, "this page has nothing here")
        elif "/heartbeat/" in scope["path"] and not is_let_in(HTTPConnection(scope)):
            await self._refuse(scope, receive, send, 401, "log in first")
        elif scope["type"] == "websocket" or scope["method"] in READING:
            await self.app(scope, receive, with_headers(send))
        else:
            await self._with_body(scope, receive, send)

    def refusal(self, scope: Scope) -> str:
        """Why a request may not pass; empty when it may."""
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        is_known = GUEST in scope or self.hosts.knows(host)
        if len(headers.getlist("host")) != 1 or not is_known:
            return "this host name is not allowed: open the address medusa-chat printed"
        return "" if self._is_of_this_page(scope, headers) else OTHER_SITE

    def _is_of_this_page(self, scope: Scope, headers: Headers) -> bool:
        """Whether no other site asks. A link from there may open the page, and no more."""
        origin = headers.get("origin")
        own = {headers.get("host", "").lower(), *self.origins}
        if origin is not None and host_of(origin) not in own:
            return False
        is_read = scope["type"] == "http" and scope["method"] in READING
        if is_read and headers.get("sec-fetch-mode", "navigate") == "navigate":
            return True
        # same-site: another port of this machine
        return headers.get("sec-fetch-site", "none") not in ("cross-site", "same-site")

    async def _with_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Read the whole body, counting what really arrives, then hand it on."""
        request = Request(scope)
        most = (
            MAX_BODY
            if GUEST in scope
            else LARGEST.get(scope["path"].removeprefix(self.prefix), MAX_BODY)
        )
        most = most if is_let_in(request) else MAX_STRANGERS_BODY
        declared = request.headers.get("content-length", "0")
        messages: list[Message] = []
        more = declared.isdecimal() and int(declared) <= most
        total = 0 if more else most + 1
        try:
            async with asyncio.timeout(BODY_SECONDS):
                while more and total <= most:
                    messages.append(await receive())
                    total += len(messages[-1].get("body", b""))
                    more = messages[-1].get("more_body", False)
        except TimeoutError:
            return await self._refuse(scope, receive, send, 408, TOO_SLOW)
        if total > most:
            reason = f"the request is too large: at most {most // 1024} KB"
            return await self._refuse(scope, receive, send, 413, reason)

        async def replay() -> Message:
            return messages.pop(0) if messages else await receive()

        await self._call(scope, replay, with_headers(send))

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand a call on. Where Gradio fails at it, the caller gets a sentence and no bare 500."""
        has_begun = has_failed = False

        async def sending(message: Message) -> None:
            nonlocal has_begun, has_failed
            has_failed = has_failed or message.get("status", 200) >= 500
            if not has_failed:
                has_begun = True
                await send(message)

        try:
            await self.app(scope, receive, sending)
        except Exception:
            if has_begun:
                raise
            logging.getLogger(__name__).info("a call that does not fit", exc_info=True)
            has_failed = True
        if has_failed and not has_begun:
            await JSONResponse({"error": MISSHAPEN}, 400)(scope, receive, send)

    async def _refuse(
        self, scope: Scope, receive: Receive, send: Send, status: int, reason: str
    ) -> None:
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            answer = PlainTextResponse(reason, status, headers={"Connection": "close"})
            await answer(scope, receive, with_headers(send))


def host_of(origin: str) -> str:
    """Host and port in an Origin header: lower case, not parsed, for a stranger may send anything;
    empty for "null"."""
    return origin.lower().partition("://")[2]


def is_guest(request: Any) -> bool:
    """Whether an event (gr.Request) comes from a guest of a shared link."""
    return GUEST_HEADER in request.headers or request.username == GUEST


def guest_of(request: Any | None) -> str:
    """Which guest an event (gr.Request) comes from, the same in every tab of a browser; empty
    where it comes from the owner."""
    if request is None or not is_guest(request):
        return ""
    return guest_named(request.headers.get(GUEST_HEADER, ""))


def guest_named(name: str) -> str:
    """A guest as an asker: never the same as OWNER, whatever a header says."""
    return f"guest {name}"


def with_headers(send: Send) -> Send:
    """The answer with our security headers, and with what its browser is to be told."""

    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
            if notices := told():
                headers[HEADER] = notices
        await send(message)

    return sending


def bound(config: uvicorn.Config) -> None:
    """Let a server have so many connections and no more, also one that runs: a new one takes the
    place of one with no whole request to answer, and where there is none it is ended."""
    _allow_files()
    if not config.loaded:
        config.load()
    usual: Any = config.http_protocol_class

    class Bounded(usual):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                others = (one for one in self.connections if one is not self)
                next(filter(_is_idle, others), self).transport.abort()

    config.http_protocol_class = Bounded


def _allow_files() -> None:
    """Let the process have a file for each connection that may wait at one moment: asyncio takes
    them all before one can be ended, and logs a traceback for each that it has no file for."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_idle(connection: Any) -> bool:
    cycle = getattr(connection, "cycle", None)
    is_asking = cycle is not None and not (cycle.response_complete or cycle.more_body)
    is_read = not connection.flow.write_paused  # else who asked does not take the answer
    return not (is_asking and is_read) and not connection.transport.is_closing()
