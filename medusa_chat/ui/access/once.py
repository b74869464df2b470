"""Once: what a tab posts is done once, however often it arrives.

A link may lose an answer. The page then posts the same again (assets/js/link.js), each tab one
thing at a time; the answer to the last one is kept for that.
"""

import asyncio
from collections import OrderedDict
from typing import NamedTuple

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from medusa_chat.ui.access.guard import GUEST, OWNER
from medusa_chat.ui.access.login_limit import is_let_in
from medusa_chat.ui.access.notices import NOTICES, Told
from medusa_chat.ui.access.share import Share

HEADER = "x-medusa-post"  # program, tab, number of what it posts; of an answer, that it is ours
MAX_TABS = 200  # whose last answer is kept
MAX_KEPT = 16 * 1024 * 1024  # bytes of all that are kept, but for the newest
OTHER_PROGRAM = "another medusa-chat runs here now: load the page again"
LATE = "this was already posted and answered"


class Post(NamedTuple):
    """What a tab posted last. answer: None where it is too large to be kept beside newer ones.
    told: what its browser is to be told beside the answer."""

    number: int
    answer: asyncio.Task[list[Message]] | None
    told: Told | None


class Once:
    """ASGI middleware for what carries HEADER. program: Gradio's number of this program, which a
    page knows as a float; another one's pages get 409. share: with its link ends what is kept of
    guests."""

    def __init__(self, app: ASGIApp, program: int, share: Share) -> None:
        self.app = app
        self.program = float(program)
        self._last: OrderedDict[tuple[str, str], Post] = OrderedDict()  # by asker and tab
        share.on_end.append(self._forget_guests)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        posted = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if posted is None:
            return await self.app(scope, receive, send)
        try:
            program, name, digits = posted.split(" ")
            is_own, number = float(program) == self.program, int(digits)
        except ValueError:
            is_own, name, number = False, "", 0
        if not is_own:
            return await PlainTextResponse(OTHER_PROGRAM, 409)(scope, receive, send)
        if scope["method"] != "POST" or not is_let_in(Request(scope)):  # nothing to do once
            return await self.app(scope, receive, send)
        tab = scope.get(GUEST, OWNER), name
        last = self._last.get(tab)
        if last is None or number > last.number:
            answer = asyncio.create_task(self._do(scope, receive))
            last = self._last[tab] = Post(number, answer, NOTICES.get())
            self._last.move_to_end(tab)
            while len(self._last) > MAX_TABS:
                self._last.popitem(last=False)
        if number < last.number or last.answer is None:
            return await PlainTextResponse(LATE, 400)(scope, receive, send)
        try:
            messages = await asyncio.shield(last.answer)
        except Exception:  # it did not arrive whole: the next one is the first
            if self._last.get(tab) is last:
                del self._last[tab]
            raise
        self._forget_large()
        NOTICES.set(last.told)
        for message in messages:
            await send(message)

    def _forget_large(self) -> None:
        """Of the longest kept answers remember only that they were given, where all are large."""
        size = 0
        for tab, post in reversed(list(self._last.items())):
            if post.answer and post.answer.done() and not post.answer.exception():
                size += sum(len(message.get("body", b"")) for message in post.answer.result())
                if size > MAX_KEPT and tab != next(reversed(self._last)):
                    self._last[tab] = post._replace(answer=None)

    def _forget_guests(self) -> None:
        for tab in list(self._last):
            if tab[0] != OWNER:
                self._last.pop(tab, None)

    async def _do(self, scope: Scope, receive: Receive) -> list[Message]:
        """The whole answer, also where nobody waits for it any more."""
        answer: list[Message] = []

        async def keep(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = "done"
            answer.append(message)

        await self.app(scope, receive, keep)
        return answer
