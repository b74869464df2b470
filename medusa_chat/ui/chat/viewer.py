"""ChatViewer: what a browser tab is shown of its chat session, once and while an answer comes."""

import asyncio
import secrets
import time
import weakref
from collections.abc import Sequence
from typing import Any

import gradio as gr

from medusa_chat.decoding.events import Event
from medusa_chat.runtime.history import History
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.reasoning_spans import visible_text
from medusa_chat.ui.chat.session_store import SessionStore
from medusa_chat.ui.chat.step_panel import panel_line, show_line
from medusa_chat.ui.chat.view import Tab, View, next_line, returned, view_of
from medusa_chat.ui.page.live import Update, Updates
from medusa_chat.ui.page.status import phase_text

POLL_SECONDS = 0.042  # between two updates of an answer
NEAR_SECONDS = 60.0  # that plain decoding's speed is taken to last, on a machine with other work
KEEP_ALIVE_SECONDS = 0.5  # a tab that was closed is noticed at the next yield


class ChatViewer:
    """What the tabs of all browsers see of the chat sessions of one runtime session."""

    def __init__(
        self, session: Session, trees: Sequence[str], history: History | None = None
    ) -> None:
        self.session = session
        self.trees = tuple(trees)
        self.sessions = SessionStore(session, self._measure, history)
        self._plain: dict[tuple[str, str, str], tuple[float, float]] = {}  # rate, when
        self._tabs: weakref.WeakValueDictionary[str, Tab] = weakref.WeakValueDictionary()

    # ---- what others ask ----

    def answer_of(self, tab: Tab) -> Answer:
        """The answer the tab shows: the one it chose, else the latest."""
        return tab.chosen_answer or self.session_of(tab).answer

    def plain_of(self, answer: Answer) -> float | None:
        """Tokens per second of plain decoding, timed beside this answer; while it comes, beside
        the one before it on this model, unless that is long ago. None where none is."""
        if answer.finished is not None or answer.is_plain or answer.model_key is None:
            return answer.plain_rate
        rate, when = self._plain.get(answer.model_key, (None, 0.0))
        return rate if time.monotonic() - when <= NEAR_SECONDS else None

    def last_message(self, tab: Tab) -> str:
        """What the user said last in the tab's chat; empty before that."""
        said = (
            m["content"]
            for m in reversed(self.session_of(tab).transcript.messages)
            if m["role"] == "user"
        )
        return next(said, "")

    def session_of(self, tab: Tab) -> ChatSession:
        """The chat the tab shows; made when it has none yet, or when it expired."""
        chat = self.sessions.open(tab.token)
        tab.token = chat.token
        tab.key = tab.key or secrets.token_urlsafe(24)
        self._tabs[tab.key] = tab
        return chat

    def updates_of(self, key: str) -> Updates | None:
        """What the tab with this key streams; None when there is no such tab."""
        tab = self._tabs.get(key)
        return None if tab is None else self.stream(tab)

    # ---- events: a tab comes ----

    def attach(self, tab: Tab, token: object, request: gr.Request | None = None) -> View:
        """A tab opens or reloads, with the token its browser keeps: everything of its chat. What
        a guest says is not written to the owner's disk."""
        known = None if tab.version else self.sessions.find(token)
        if known is not None:
            tab.token = known.token
        chat = self.session_of(tab)
        chat.is_kept = request is None or not is_guest(request)
        chat.touch()
        return self.refresh(tab)

    def tick(self, tab: Tab) -> Any:
        """Once a second: tell the tab to refresh when its chat has changed elsewhere."""
        if not tab.version:
            return gr.skip()  # it has not said yet which chat is its own
        chat = self.session_of(tab)
        chat.touch()
        if tab.version == chat.version and (tab.is_streaming or not chat.is_running):
            return gr.skip()
        return next_line(tab, chat, "refresh")

    def refresh(self, tab: Tab, box: object = "") -> View:
        """Show what has changed; box: what is being written."""
        view = self._view(tab)
        return view._replace(box=returned(self.session_of(tab).pop_returned(), box))

    async def stream(self, tab: Tab) -> Updates:
        """About 25 updates a second until the answer has ended. Any number of tabs may; closing
        one only ends its view."""
        chat = self.session_of(tab)
        if tab.is_streaming or not chat.is_running:
            return
        tab.is_streaming = tab.has_live = True
        chat.enter()
        try:
            async for update in self._updates(tab, chat):
                yield update
        finally:
            tab.is_streaming = False
            chat.leave()

    async def _updates(self, tab: Tab, chat: ChatSession) -> Updates:
        answer, told, sent, shown = chat.answer, 0.0, 0, 0
        before: tuple[str, int, int, bool] | None = None
        while True:
            is_over = chat.answer is not answer or not chat.is_running
            if not is_over:
                chat.fold(self._waiting_for)
            is_paced = chat.is_paced and not is_over
            show, shown = show_line(answer, shown) if is_paced else ("", shown)
            steps, version = shown if is_paced else len(answer.steps), chat.version
            now, state = time.monotonic(), (answer.live, steps, version, answer.finished is None)
            if state != before or now > told + KEEP_ALIVE_SECONDS or is_over:
                before, told = state, now
                known = sent if self.answer_of(tab) is answer else 0
                panel = self._panel(tab, since=known)
                changed = version if version != tab.version and not is_over else 0
                text = "" if show else visible_text(answer.text)
                yield Update(answer.live, text, panel, changed, show)
                sent = steps
            if is_over:
                return
            spent = time.monotonic() - now
            await asyncio.sleep(max(POLL_SECONDS - spent, POLL_SECONDS / 2))

    def _view(self, tab: Tab) -> View:
        return view_of(tab, self.session_of(tab), lambda: self._panel(tab))

    def _waiting_for(self, job: Ticket[Event]) -> str:
        if job.state == "running":
            return "prefill: reading the conversation …"
        ahead = self.session.position(job)
        if ahead:
            return f"waiting: {ahead} ahead"
        state = self.session.state
        if state.status == "loading":
            return f"waiting for the model: {phase_text(state)} …"
        return "starting …"

    def _panel(self, tab: Tab, step: int | None = None, since: int = 0) -> str:
        answer = self.answer_of(tab)
        if answer.prefilled is None and not self.session_of(tab).is_running:
            return ""
        return panel_line(answer, self.plain_of(answer), step, since)

    def _measure(self, answer: Answer) -> None:
        """Remember the plain speed that was timed beside the answer."""
        if answer.plain_rate and answer.model_key:
            self._plain[answer.model_key] = answer.plain_rate, time.monotonic()
