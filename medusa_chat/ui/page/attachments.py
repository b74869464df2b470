"""Attachments: the text of a PDF file that a browser puts into a message; nothing of it is kept."""

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.pdf_text import pdf_text
from medusa_chat.ui.access.guard import ATTACHMENTS
from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.page.live import TAB_HEADER, UNKNOWN


class Attachments:
    """ASGI middleware that answers POST /attachments with {"text", "pages"}, for who has a tab's
    key (see Live). is_tab: whether there is a tab with this key."""

    def __init__(self, app: ASGIApp, is_tab: Callable[[str], bool]) -> None:
        self.app, self.is_tab = app, is_tab

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == ATTACHMENTS
        if not is_ours or scope["method"] != "POST":
            return await self.app(scope, receive, send)
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if not is_let_in(request):
            return PlainTextResponse("log in first", 401)
        if not self.is_tab(request.headers.get(TAB_HEADER, "")):
            return PlainTextResponse(UNKNOWN, 404)
        try:
            found = await run_in_threadpool(pdf_text, await request.body())
        except MedusaChatError as error:
            return PlainTextResponse(str(error), 400)
        return JSONResponse(found._asdict(), headers={"Cache-Control": "no-store"})
