"""ChatViewer: what a browser tab is shown of its chat session, once and while an answer comes."""

import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import Generator, Sequence
from typing import Any

import gradio as gr
from starlette.concurrency import run_in_threadpool

from medusa_chat.decoding.events import Event
from medusa_chat.runtime.history import History
from medusa_chat.runtime.requests import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.traces import FOLDER, StepStore
from medusa_chat.ui.access.guard import ASKER, OWNER, guest_of
from medusa_chat.ui.access.notices import warn
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.conversation_list import ConversationList, list_line
from medusa_chat.ui.chat.session_store import SessionStore
from medusa_chat.ui.chat.step_panel import panel_line, show_line
from medusa_chat.ui.chat.view import View, has_watched, next_line, view_of
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.inputs import from_browser
from medusa_chat.ui.page.live import Update, Updates
from medusa_chat.ui.page.status import waiting_text

POLL_SECONDS = 0.042  # between two updates of an answer
NEAR_SECONDS = 60.0  # that plain decoding's speed is taken to last, on a machine with other work
KEEP_ALIVE_SECONDS = 0.5  # a tab that was closed is noticed at the next yield
SYSTEM_HINT = "Goes before every message of this conversation. A new chat starts without one."
NO_SYSTEM = "No effect with the demo model: it was not trained to follow one."


class ChatViewer:
    """What the tabs of all browsers see of the chat sessions of one runtime session."""

    def __init__(
        self, session: Session, trees: Sequence[str], history: History | None = None
    ) -> None:
        self.session = session
        self.trees = tuple(trees)
        steps = StepStore(history.file.parent / FOLDER) if history else None
        self.sessions = SessionStore(session, self._measure, history, steps)
        self.list = ConversationList(self.sessions)
        self._watched: tuple[Ticket[Event] | None, Answer] = (None, Answer())
        self._watching = threading.Lock()
        self._plain: dict[tuple[str, ...], tuple[float, float]] = {}  # rate, when
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
        said = reversed(self.session_of(tab).transcript.messages)
        return next((m["content"] for m in said if m["role"] == "user"), "")

    def session_of(self, tab: Tab) -> ChatSession:
        """The conversation the tab shows; a new one when it has none yet, or when it is gone."""
        chat = self.sessions.open(tab.scope or ASKER.get() or "", tab.conversation)
        if (chat.scope, chat.id) != (tab.scope, tab.conversation):
            tab.turn_to(chat)
        tab.key = tab.key or secrets.token_urlsafe(24)
        self._tabs[tab.key] = tab
        return chat

    def tab_of(self, key: str) -> Tab | None:
        """The tab with this key; None when who asks has no such tab."""
        tab = self._tabs.get(key)
        return None if tab is None or ASKER.get() not in (None, tab.scope) else tab

    def updates_of(self, key: str) -> Updates | None:
        """What the tab with this key streams; None when who asks has no such tab."""
        return self.stream(tab) if (tab := self.tab_of(key)) else None

    # ---- events: a tab comes ----

    def attach(self, tab: Tab, known: object, request: gr.Request | None = None) -> View:
        """A tab opens or reloads: all of the conversation of its address, else of the last it
        showed, else of the last of its browser. A guest reaches only what was said in the same one.
        known: JSON of what the browser knows, {"link": id, "tab": id, "last": id}."""
        kept = from_browser(known)
        if not tab.version:
            tab.scope = guest_of(request) or OWNER
            ids = (kept.get("link"), kept.get("tab"), kept.get("last"))
            open_ids = [id for id in ids if self.sessions.find(tab.scope, id)]
            tab.conversation = open_ids[0] if open_ids else ""
        if tab.scope == OWNER:
            self.sessions.own()
        self.sessions.refresh(self.session_of(tab))
        self.session_of(tab).touch()
        return self.refresh(tab)

    def tick(self, tab: Tab, shown: object = "") -> Any:
        """Once a second: tell the tab to refresh when its chat has changed elsewhere, or when it
        does not show the last view. shown: the line (`next_line`) that it has."""
        if not tab.version:
            return gr.skip()  # it has not said yet which chat is its own
        self.sessions.touch(tab.scope)
        chat = self.session_of(tab)
        chat.touch()
        is_shown = tab.version == chat.version and not self.sessions.failures(tab.scope, tab.told)
        is_shown &= tab.list_version == self.sessions.version(tab.scope)
        is_shown &= tab.system is not None and tab.system[1] == self._hint
        is_shown &= tab.model == self._model and tab.has_watched == has_watched(chat)
        view = from_browser(shown).get("view")
        if is_shown and (tab.is_streaming or not chat.is_running):
            if not tab.is_behind(view):
                return gr.skip()
            tab.turn_to(chat)  # it is drawn anew
        return next_line(tab, chat, "refresh", view if isinstance(view, int) else 0)

    def refresh(self, tab: Tab) -> View:
        """Show what has changed; a message that came to nothing goes back into the box."""
        tab.give(self.session_of(tab).pop_returned())
        for line in self.sessions.failures(tab.scope, tab.told):
            warn(line, seconds=None)
        tab.told = self.sessions.told
        return self._view(tab)

    def redraw(self, tab: Tab) -> View:
        """Show all of it anew: a view of news came late or never, or the stream broke."""
        tab.turn_to(self.session_of(tab))
        tab.is_streaming = False
        return self.refresh(tab)

    async def stream(self, tab: Tab) -> Updates:
        """About 25 updates a second until the answer has ended. Any number of tabs may; closing
        one only ends its view."""
        chat = self.session_of(tab)
        if tab.is_streaming or not chat.is_running:
            return
        tab.is_streaming = tab.has_live = True
        tab.streams = mine = tab.streams + 1
        chat.enter()
        looks = self._looks(tab, chat)
        try:  # in threads: a save may hold the conversation's lock, and all tabs would wait here
            while (update := await run_in_threadpool(next, looks, None)) is not None:
                if update:
                    yield update
                await asyncio.sleep(POLL_SECONDS)
        finally:
            tab.has_live = True  # what it wrote stands there, whatever was drawn meanwhile
            tab.is_streaming &= tab.streams != mine
            chat.leave(tab.conversation == chat.id)
            looks.close()

    def _looks(self, tab: Tab, chat: ChatSession) -> Generator[Update | tuple[()], None, None]:
        answer, turns, told, sent, shown = chat.answer, tab.turns, 0.0, 0, 0
        before: tuple[str, int, int, bool] | None = None
        while tab.turns == turns:  # else it shows another one, or this one from its begin
            is_over = chat.answer is not answer or not chat.is_running
            if not is_over:
                chat.fold(self._waiting_for)
            is_paced = chat.is_paced and not is_over
            show, shown = show_line(answer, shown) if is_paced else ("", shown)
            steps, version = shown if is_paced else len(answer.steps), chat.version
            now, state = time.monotonic(), (answer.live, steps, version, answer.finished is None)
            if state != before or now > told + KEEP_ALIVE_SECONDS or is_over:
                before, told = state, now
                self.sessions.touch(tab.scope)
                panel = self._panel(tab, since=sent if self.answer_of(tab) is answer else 0)
                changed = version if version != tab.version and not is_over else 0
                text = "" if show else answer.text
                yield Update(answer.live, text, panel, changed, show)
                sent = steps
            else:
                yield ()
            if is_over:
                return

    def _view(self, tab: Tab) -> View:
        chat, tab.model = self.session_of(tab), self._model
        return view_of(tab, chat, lambda: self._panel(tab), lambda: self._list(tab), self._hint)

    @property
    def _hint(self) -> str:
        """What a system prompt does with the model that is loaded."""
        model = self.session.state.model
        return NO_SYSTEM if model is not None and model.name == "demo" else SYSTEM_HINT

    @property
    def _model(self) -> str:
        model = self.session.state.model
        return model.name if model else ""

    def _list(self, tab: Tab) -> Any:
        """The list of conversations, when the tab does not show it as it is."""
        version = self.sessions.version(tab.scope)
        if tab.list_version == version:
            return gr.skip()
        tab.list_version = version
        entries, is_more = self.list.entries(tab.scope, tab.search, tab.listed)
        binned = self.list.binned(tab.scope)
        return list_line(entries, binned, self.session_of(tab), tab, is_more)

    def _waiting_for(self, job: Ticket[Event]) -> str:
        if job.is_cancelled:
            return "stopping …"
        if job.state == "running":
            read = job.reading
            known = f": {read.tokens:,} of {read.prompt_tokens:,} tokens" if read else ""
            return f"reading the conversation{known} …"
        return waiting_text(self.session.state, self.session.position(job))

    def _panel(self, tab: Tab, step: int | None = None, since: int = 0) -> str:
        answer, chat = self.answer_of(tab), self.session_of(tab)
        self.sessions.recall(chat, answer)
        if answer.prefilled is None and not chat.is_running:
            return ""
        plain, is_watched = self.plain_of(answer), tab.watched is not None
        return panel_line(answer, plain, step, since, answer is chat.answer, is_watched)

    def watch(self, tab: Tab, event: gr.EventData) -> Any:
        """The panel with the newest answer that another program asked for over the API, as far as
        it has come, where that is news. It is the owner's to see, and stays in memory until the
        next one. A tab that has looked elsewhere since it `begins` watches no more."""
        chat, ticket = self.session_of(tab), self.session.watched
        if event_field(event, "begins") is True:
            tab.watched = ""
        if tab.watched is None or not has_watched(chat) or ticket is None:
            return gr.skip()
        with self._watching:
            if self._watched[0] is not ticket:
                self._watched = (ticket, Answer(chat.number()))
            answer = tab.chosen_answer = self._watched[1]
            answer.add(ticket.trace[len(answer.events) :])
        shown, tab.watched = tab.watched, self._panel(tab)
        return gr.skip() if shown == tab.watched else tab.watched

    def _measure(self, answer: Answer) -> None:
        """Remember the plain speed that was timed beside the answer."""
        if answer.plain_rate and answer.model_key:
            self._plain[answer.model_key] = answer.plain_rate, time.monotonic()
