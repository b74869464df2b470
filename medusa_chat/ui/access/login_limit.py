"""LoginLimit: how often the owner's password may be tried. Gradio lets everybody try for ever."""

import hashlib
import hmac
import secrets

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.ui.access.throttle import SLOW_DOWN, Throttle

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
        return address, address not in LOOPBACK or "x-forwarded-for" in request.headers

    def _cookie(self) -> str:
        name = secrets.token_urlsafe(12)
        return f"{COOKIE}={name}.{self._mark(name)}; HttpOnly; SameSite=Lax; Path=/"

    def _mark(self, name: str) -> str:
        return hmac.new(self._secret, name.encode(), hashlib.sha256).hexdigest()


def _is_login(path: str) -> bool:
    return path.rstrip("/").endswith("/login")
