"""What a tab gets and gives beside Gradio's events: the answer that runs, chats, attachments.

The answer is a stream of its own: through Gradio's queue an update costs about 10 ms in the browser
and 13 ms in the server on a slow machine (every property of every output is compared, templates are
compiled anew); here it costs what is new in it. Gradio's events would keep the file of all chats
whole in the page, and take at most 4 MB.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.pdf_text import pdf_text
from medusa_chat.ui.access.guard import ATTACHMENTS, CHATS
from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.page.tree_view import to_line

PATH = "/live"
TAB_HEADER = "x-medusa-tab"  # a header: no other site can send it, and no log writes it down
UNKNOWN = "this tab is not known here: load the page again"
FRESH = {"Cache-Control": "no-store"}


class Update(NamedTuple):
    """What a tab shows of the answer that runs: all of `live` (lines that only grow) and `text`,
    the panel's JSON with the bars it does not have yet. version: of its chat session, when
    something else has changed there that the tab does not show; else 0. show: JSON of new steps,
    where the tab shows them one by one."""

    live: str
    text: str
    panel: str
    version: int = 0
    show: str = ""


Updates = AsyncIterator[Update]


class Live:
    """ASGI middleware for what the page asks with a tab's key, a secret of the tab; a page with a
    login asks for that as well. GET /live: server-sent events, one for each update of the answer.
    GET /chats: the file of all conversations; POST /chats takes one in. POST /attachments: the text
    of a PDF file, {"text", "pages"}, of which nothing is kept.

    updates_of: the updates of the tab that has this key. save: its file. take: what to say of a
    file that was taken in; raises what is wrong with it. All three: None where there is no such
    tab, which is what is_tab says.
    """

    def __init__(
        self,
        app: ASGIApp,
        updates_of: Callable[[str], Updates | None],
        save: Callable[[str], str | None],
        take: Callable[[str, bytes], str | None],
        is_tab: Callable[[str], bool],
    ) -> None:
        self.app = app
        self.updates_of, self.save, self.take, self.is_tab = updates_of, save, take, is_tab
        self._answers = {
            ("GET", PATH): self._stream,
            ("GET", CHATS): self._file,
            ("POST", CHATS): self._taken,
            ("POST", ATTACHMENTS): self._text,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_http = scope["type"] == "http"
        answer = self._answers.get((scope["method"], scope["path"])) if is_http else None
        if answer is None:
            return await self.app(scope, receive, send)
        request = Request(scope, receive)
        made: Response | None
        if not is_let_in(request):
            made = PlainTextResponse("log in first", 401)
        else:
            try:
                made = await answer(request, request.headers.get(TAB_HEADER, ""))
            except MedusaChatError as error:
                made = PlainTextResponse(str(error), 400)
        await (made or PlainTextResponse(UNKNOWN, 404))(scope, receive, send)

    async def _stream(self, request: Request, key: str) -> Response | None:
        if (updates := self.updates_of(key)) is None:
            return None
        quick = {**FRESH, "X-Accel-Buffering": "no"}
        return StreamingResponse(packed(updates), media_type="text/event-stream", headers=quick)

    async def _file(self, request: Request, key: str) -> Response | None:
        text = await run_in_threadpool(self.save, key)
        return None if text is None else PlainTextResponse(text, headers=FRESH)

    async def _taken(self, request: Request, key: str) -> Response | None:
        text = await run_in_threadpool(self.take, key, await request.body())
        return None if text is None else PlainTextResponse(text, headers=FRESH)

    async def _text(self, request: Request, key: str) -> Response | None:
        if not self.is_tab(key):
            return None
        found = await run_in_threadpool(pdf_text, await request.body())
        return JSONResponse(found._asdict(), headers=FRESH)


async def packed(updates: Updates) -> AsyncIterator[str]:
    """Each update as one server-sent event with what is new in it: {"live": lines to add,
    "text": all of it, or "more": what to add to it, "panel": what the panel draws, "refresh":
    whether to ask for the rest of the chat session, "show": steps to show one by one}. An update
    without news is a comment: only by writing does a server notice that nobody listens."""
    before = Update("", "", "")
    async for update in updates:
        parts = list(_news(before, update))
        before = update
        yield f"data: {{{','.join(parts)}}}\n\n" if parts else ":\n\n"


def _news(before: Update, now: Update) -> Iterator[str]:
    if len(now.live) > len(before.live):
        yield f'"live":{to_line(now.live[len(before.live) :])}'
    if now.text != before.text:
        is_more = now.text.startswith(before.text) and before.text
        new = now.text[len(before.text) :] if is_more else now.text
        yield f'"{"more" if is_more else "text"}":{to_line(new)}'
    if now.panel != before.panel:
        yield f'"panel":{now.panel or "null"}'
    if now.version not in (0, before.version):
        yield '"refresh":true'
    if now.show:
        yield f'"show":{now.show}'
