"""LoginLimit: how often a password may be tried; and who is logged in.

Gradio lets everybody try for ever.
"""

import asyncio
import hashlib
import hmac
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

OF_ONE, OF_ALL = 5, 30  # failures a minute
MAX_WAITING = 10  # of one address
WAIT_SECONDS = 2.0
SLOW_DOWN = "Too many wrong passwords. Wait a minute and try again."


class Throttle:
    """At most OF_ONE failures a minute of one address, OF_ALL of everybody."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: deque[tuple[float, str]] = deque()

    def is_shut(self, address: str, is_stranger: bool = True) -> bool:
        """Whether this address must wait: for its own failures, a stranger for everybody's too."""
        while self._failures and self._failures[0][0] < self._clock() - 60:
            self._failures.popleft()
        mine = sum(1 for _, other in self._failures if other == address)
        return mine >= OF_ONE or (is_stranger and len(self._failures) >= OF_ALL)

    def count(self, address: str) -> None:
        """A failure of this address."""
        self._failures.append((self._clock(), address))

    def forgive(self, address: str) -> None:
        """Remove the newest failure of this address from the count: it was no wrong password."""
        for failure in reversed(self._failures):
            if failure[1] == address:
                return self._failures.remove(failure)


class WaitingRoom:
    """Where those wait a moment who ask after too many wrong passwords: strangers guess slowly, and
    whoever knows the right one still comes in. One address has a few places, so that its guesses do
    not take all connections."""

    def __init__(self) -> None:
        self._waiting: Counter[str] = Counter()

    async def passed(self, address: str) -> bool:
        """Wait; False, at once, where too many of this address wait."""
        if self._waiting[address] >= MAX_WAITING:
            return False
        self._waiting[address] += 1
        try:
            await asyncio.sleep(WAIT_SECONDS)
        finally:
            self._waiting[address] -= 1
            self._waiting += Counter()  # nobody of it waits any more: it is forgotten
        return True


COOKIE = "medusa-known"  # of a browser that has logged in since the server was started
LOOPBACK = ("127.0.0.1", "::1")


class LoginLimit:
    """ASGI middleware that answers 429 to too many wrong passwords.

    A browser that has logged in before, and whoever sits at this machine, waits for their own
    mistakes only: strangers who try one password after the other cannot lock the owner out.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.throttle = Throttle()
        self._secret = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST" or not _is_login(scope["path"]):
            return await self.app(scope, receive, send)
        who, is_stranger = self._visitor(Request(scope))
        if self.throttle.is_shut(who, is_stranger):
            return await PlainTextResponse(SLOW_DOWN, 429)(scope, receive, send)
        self.throttle.count(who)

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] < 400:
                self.throttle.forgive(who)
                MutableHeaders(scope=message).append("set-cookie", self._cookie())
            await send(message)

        await self.app(scope, receive, sending)

    def _visitor(self, request: Request) -> tuple[str, bool]:
        """Who tries, and whether it is a stranger, whose address may be made up."""
        cookie = request.cookies.get(COOKIE, "")
        name, _, mark = cookie.partition(".")
        if hmac.compare_digest(mark.encode(), self._mark(name).encode()):
            return cookie, False
        address = request.client.host if request.client else ""
        if "x-forwarded-for" in request.headers:  # not counted for whoever has this address
            return f"forwarded {address}", True
        return address, address not in LOOPBACK

    def _cookie(self) -> str:
        name = secrets.token_urlsafe(12)
        return f"{COOKIE}={name}.{self._mark(name)}; HttpOnly; SameSite=Lax; Path=/"

    def _mark(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()


def is_let_in(request: Request) -> bool:
    """Whether Gradio's login, where the page has one, knows who asks."""
    app = request.scope.get("app")
    if getattr(app, "auth", None) is None:
        return True
    names = (f"access-token-{app.cookie_id}", f"access-token-unsecure-{app.cookie_id}")
    return any(request.cookies.get(name) in app.tokens for name in names)


def _is_login(path: str) -> bool:
    return path.rstrip("/").endswith("/login")
