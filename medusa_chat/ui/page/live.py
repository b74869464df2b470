"""Live: the answer that runs as a stream of its own, beside Gradio's queue.

Through the queue an update costs about 10 ms in the browser and 13 ms in the server on a slow
machine (every property of every output is compared, templates are compiled anew); here it costs
what is new in it.
"""

from collections.abc import AsyncIterator, Callable, Iterator
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.page.tree_view import to_line

PATH = "/live"
TAB_HEADER = "x-medusa-tab"  # a header: no other site can send it, and no log writes it down
UNKNOWN = "this tab is not known here: load the page again"


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
    """ASGI middleware that answers GET /live: server-sent events, one for each update.

    updates_of: the updates of the tab that has this key, None when there is no such tab. The key
    is a secret of the tab; a page with a login asks for that as well.
    """

    def __init__(self, app: ASGIApp, updates_of: Callable[[str], Updates | None]) -> None:
        self.app = app
        self.updates_of = updates_of

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != PATH or scope["method"] != "GET":
            await self.app(scope, receive, send)
            return
        await self._answer(Request(scope))(scope, receive, send)

    def _answer(self, request: Request) -> Response:
        if not is_let_in(request):
            return PlainTextResponse("log in first", 401)
        updates = self.updates_of(request.headers.get(TAB_HEADER, ""))
        if updates is None:
            return PlainTextResponse(UNKNOWN, 404)
        quick = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(packed(updates), media_type="text/event-stream", headers=quick)


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
