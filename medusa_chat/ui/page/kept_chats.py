"""KeptChats: the file of all conversations, given to the browser and taken from it.

Gradio's events would keep it whole in the page, and take at most 4 MB.
"""

from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.access.guard import CHATS
from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.page.live import TAB_HEADER, UNKNOWN

Save = Callable[[str], str | None]
Take = Callable[[str, bytes], str | None]


class KeptChats:
    """ASGI middleware that answers GET and POST /chats, for who has a tab's key (see Live).

    save: the file of the tab with a key. take: what to say of a file that was taken in; raises
    what is wrong with it. Both: None where there is no such tab.
    """

    def __init__(self, app: ASGIApp, save: Save, take: Take) -> None:
        self.app, self.save, self.take = app, save, take

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_ours = scope["type"] == "http" and scope["path"] == CHATS
        if not is_ours or scope["method"] not in ("GET", "POST"):
            return await self.app(scope, receive, send)
        await (await self._answer(Request(scope, receive)))(scope, receive, send)

    async def _answer(self, request: Request) -> Response:
        if not is_let_in(request):
            return PlainTextResponse("log in first", 401)
        key = request.headers.get(TAB_HEADER, "")
        if request.method == "GET":
            text = await run_in_threadpool(self.save, key)
        else:
            try:
                text = await run_in_threadpool(self.take, key, await request.body())
            except MedusaChatError as error:
                return PlainTextResponse(str(error), 400)
        if text is None:
            return PlainTextResponse(UNKNOWN, 404)
        return PlainTextResponse(text, headers={"Cache-Control": "no-store"})
