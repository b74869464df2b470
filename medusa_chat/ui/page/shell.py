"""Shell: the page's HTML around what Gradio draws, and our scripts: ES modules, and what they know.

A page imports the modules by the names of its import map, at an address that names their content,
so that an old page and a new program never mix them: the address of another version is not found,
and the page is loaded again (assets/js/link.js).
"""

import base64
import hashlib
import re
from collections.abc import Mapping
from typing import Any

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.paths import asset
from medusa_chat.ui.page.markup import RULES
from medusa_chat.ui.page.pace import gpu_times
from medusa_chat.ui.page.tree_view import to_line

HEAD = re.compile(rb"<head[^>]*>")
ADVERTS = re.compile(rb'<meta\s+(?:property="og:|name="twitter:)[^>]*/>')  # of Gradio, not of us
NAME = "medusa/"  # what an import begins with that is no module's: import("medusa/show.js")
PATH = "/scripts/"
IN_THE_PAGE = ("first.js", "link.js")  # before Gradio's own script; no modules
OF_FILES = ("replay_file.js", "file_place.js")  # of an answer saved as a file, none of the page
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}


class Shell:
    """ASGI middleware that puts our head, skeleton and first script into Gradio's HTML page, and
    answers GET /scripts/VERSION/NAME.js to everybody, as Gradio does its own scripts: they are in
    the package that anybody can read.

    prefix: the page's path behind a proxy; taken off where the proxy left it on.
    """

    def __init__(self, app: ASGIApp, prefix: str = "") -> None:
        self.app = app
        self.prefix = prefix.rstrip("/")
        self.modules = modules()
        self.at = f"{PATH}{version(self.modules)}/"
        self.first = script_head(self.prefix, given()).encode()
        self.head, self.body = head_part(), body_part()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if self.prefix and scope["path"].startswith(f"{self.prefix}/"):
            path = scope["path"][len(self.prefix) :]
            scope = {**scope, "path": path, "raw_path": path.encode()}
        if scope["path"].startswith(PATH):
            return await self._script(scope)(scope, receive, send)
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

    def _script(self, scope: Scope) -> Response:
        name = scope["path"].removeprefix(self.at)
        if scope["method"] not in ("GET", "HEAD") or name not in self.modules:
            return PlainTextResponse("no script of this version is here", 404)
        return Response(self.modules[name], media_type="text/javascript", headers=FOR_EVER)

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


def given() -> dict[str, Any]:
    """What the scripts know from the start, of the page and of a file saved from it, by name: times
    of a step on named GPUs, and the rules by which text is no HTML."""
    return {"GPU_TIMES": gpu_times(), "RULES": RULES}


def modules() -> dict[str, bytes]:
    """The modules by file name."""
    files = sorted(asset("js").glob("*.js"))
    return {file.name: file.read_bytes() for file in files if file.name not in IN_THE_PAGE}


def version(found: Mapping[str, bytes]) -> str:
    """Ten hexadecimal digits that change with any of the modules."""
    digest = hashlib.sha256()
    for name, code in found.items():
        digest.update(b"%s %d\n%s" % (name.encode(), len(code), code))
    return digest.hexdigest()[:10]


def script_head(prefix: str, known: Mapping[str, object]) -> str:
    """For the top of the page's head, before any module: where the modules are, and what they
    know from the start. prefix: the page's path behind a proxy."""
    found = modules()
    at = f"{prefix}{PATH}{version(found)}/"
    places = to_line({"imports": {NAME: at}})
    preloads = "".join(
        f'<link rel="modulepreload" href="{at}{name}">' for name in found if name not in OF_FILES
    )
    return (
        f'<script type="importmap">{_inside(places)}</script>'
        f'<script type="application/json" id="known">{_inside(to_line(dict(known)))}</script>'
        f"{preloads}"
    )


def _inside(line: str) -> str:
    """JSON that stands in a script element, which it cannot end."""
    return line.replace("<", "\\u003c")
