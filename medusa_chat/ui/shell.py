"""Shell: what the browser shows before Gradio's script has drawn the page, and around it."""

import base64
import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.paths import asset
from medusa_chat.ui.page.scripts import IN_THE_PAGE, script_head

HEAD = re.compile(rb"<head[^>]*>")
ADVERTS = re.compile(rb'<meta\s+(?:property="og:|name="twitter:)[^>]*/>')  # of Gradio, not of us


class Shell:
    """ASGI middleware that puts our head, skeleton and first script into Gradio's HTML page.

    prefix: the page's path behind a proxy; taken off where the proxy left it on. known: what our
    scripts know from the start, by name.
    """

    def __init__(self, app: ASGIApp, prefix: str, known: Mapping[str, object]) -> None:
        self.app = app
        self.prefix = prefix.rstrip("/")
        self.first = script_head(self.prefix, known).encode()
        self.head, self.body = head_part(), body_part()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.prefix and scope["path"].startswith(f"{self.prefix}/"):
            path = scope["path"][len(self.prefix) :]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["method"] not in ("GET", "HEAD"):
            return await self.app(scope, receive, send)
        start: Message | None = None
        body = b""

        async def sending(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start" and _is_page(message):
                start = message
            elif start is None:
                await send(message)
            else:
                body += message.get("body", b"")
                if not message.get("more_body", False):
                    await self._send_page(scope, start, body, send)

        await self.app(scope, receive, sending)

    async def _send_page(self, scope: Scope, start: Message, body: bytes, send: Send) -> None:
        page = self._dressed(body) if body else b""
        if scope["method"] == "GET":
            length = str(len(page)).encode()
            headers = [pair for pair in start["headers"] if pair[0] != b"content-length"]
            start = {**start, "headers": [*headers, (b"content-length", length)]}
        await send(start)
        await send({"type": "http.response.body", "body": page})

    def _dressed(self, page: bytes) -> bytes:
        head, end, rest = page.partition(b"</head>")
        if not end:
            return page
        head = (
            HEAD.sub(lambda tag: tag[0] + self.first, ADVERTS.sub(b"", head), count=1) + self.head
        )
        before, tag, after = rest.partition(b"<gradio-app")
        return head + end + before + self.body + tag + after


def head_part() -> bytes:
    """Title, description, colours and icon, and the style of the first paint."""
    icon = base64.b64encode(asset("icons", "medusa.svg").read_bytes()).decode()
    page = _text("html", "head.html").replace("{icon}", f"data:image/svg+xml;base64,{icon}")
    return f"{page}<style>{_text('css', 'first.css')}</style>".encode()


def body_part() -> bytes:
    """The script that says light or dark, before anything that may be drawn; the skeleton, which
    it takes away; and what keeps up the link to the server."""
    skeleton = _text("html", "first.html").replace("{mark}", mark())
    first, link = (f"<script>{_text('js', name)}</script>" for name in IN_THE_PAGE)
    return f"{first}{skeleton}{link}".encode()


def mark() -> str:
    """Our sign as SVG, for the page itself; nobody needs to hear of it."""
    return _text("icons", "medusa.svg").strip().replace("<svg ", '<svg aria-hidden="true" ', 1)


def _text(*parts: str) -> str:
    return asset(*parts).read_text(encoding="utf-8")


def _is_page(start: Message) -> bool:
    return any(
        name == b"content-type" and value.startswith(b"text/html")
        for name, value in start["headers"]
    )
