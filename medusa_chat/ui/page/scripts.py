"""The page's own scripts: ES modules at an address that names their content, and what they know.

A page imports them by the names of its import map, so that an old page and a new program never mix
their modules: the address of another version is not found, and the page is loaded again (link.js).
"""

import hashlib
from collections.abc import Mapping

from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat.paths import asset
from medusa_chat.ui.page.tree_view import to_line

NAME = "medusa/"  # what an import begins with that is no module's: import("medusa/show.js")
PATH = "/scripts/"
IN_THE_PAGE = ("first.js", "link.js")  # before Gradio's own script; no modules
OF_FILES = ("replay_file.js", "file_place.js")  # of an answer saved as a file, none of the page
FOR_EVER = {"Cache-Control": "public, max-age=31536000, immutable"}


class Scripts:
    """ASGI middleware that answers GET /scripts/VERSION/NAME.js to everybody, as Gradio does its
    own scripts: they are in the package that anybody can read."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.modules = modules()
        self.at = f"{PATH}{version(self.modules)}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(PATH):
            await self.app(scope, receive, send)
            return
        await self._answer(scope)(scope, receive, send)

    def _answer(self, scope: Scope) -> Response:
        name = scope["path"].removeprefix(self.at)
        if scope["method"] not in ("GET", "HEAD") or name not in self.modules:
            return PlainTextResponse("no script of this version is here", 404)
        return Response(self.modules[name], media_type="text/javascript", headers=FOR_EVER)


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
