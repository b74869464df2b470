"""ChatController: what the Chat tab's events do. Every input passes `inputs.checked` first."""

import asyncio
import secrets
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import gradio as gr

from medusa_chat.decoding.events import Event
from medusa_chat.errors import MedusaChatError
from medusa_chat.runtime.history import History
from medusa_chat.runtime.scheduler import Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.access.guard import is_guest
from medusa_chat.ui.chat.answer import Answer, Row
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.node_card import card_line
from medusa_chat.ui.chat.reasoning_spans import said
from medusa_chat.ui.chat.session_store import SessionStore
from medusa_chat.ui.chat.step_panel import panel_line
from medusa_chat.ui.chat.view import Tab, View, error_line, next_line, returned, rows_of, view_of
from medusa_chat.ui.page.inputs import Inputs, checked
from medusa_chat.ui.page.live import Update, Updates
from medusa_chat.ui.page.status import phase_text

POLL_SECONDS = 0.042
KEEP_ALIVE_SECONDS = 0.5  # a tab that was closed is noticed at the next yield
SETTINGS = (  # in the order in which events post them
    "vanilla",
    "drafter",
    "acceptance",
    "temperature",
    "top_p",
    "top_k",
    "posterior_threshold",
    "locked",
    "posterior_alpha",
    "tree",
    "nodes",
    "max_new_tokens",
    "seed",
    "stop",
    "system",
)


class ChatController:
    """The page's side of one session, shared by all tabs."""

    def __init__(
        self, session: Session, trees: Sequence[str], history: History | None = None
    ) -> None:
        self.session = session
        self.trees = tuple(trees)
        self.rooms = SessionStore(session, self._measure, history)
        self._plain: dict[tuple[str, str, str], float] = {}
        self._tabs: weakref.WeakValueDictionary[str, Tab] = weakref.WeakValueDictionary()

    # ---- what others ask ----

    def answer_of(self, tab: Tab) -> Answer:
        """The answer the tab looks at: the one it chose, else the latest."""
        return tab.looks_at or self.room_of(tab).answer

    def plain_of(self, answer: Answer) -> float | None:
        """Tokens per second of plain decoding, measured on this answer's model, or None."""
        key = answer.model_key
        return answer.plain_rate or (self._plain.get(key) if key else None)

    def measured_plain(self, key: tuple[str, str, str], rate: float) -> None:
        """Remember the plain speed of a model: (name, precision, device)."""
        self._plain[key] = rate

    def last_message(self, tab: Tab) -> str:
        """What the user said last in the tab's room; empty before that."""
        said = (
            m["content"] for m in reversed(self.room_of(tab).talk.messages) if m["role"] == "user"
        )
        return next(said, "")

    def room_of(self, tab: Tab) -> ChatSession:
        """The room the tab shows; made when it has none yet, or when it expired."""
        room = self.rooms.open(tab.token)
        tab.token = room.token
        tab.key = tab.key or secrets.token_urlsafe(24)
        self._tabs[tab.key] = tab
        return room

    def updates_of(self, key: str) -> Updates | None:
        """What the tab with this key streams; None when there is no such tab."""
        tab = self._tabs.get(key)
        return None if tab is None else self.stream(tab)

    # ---- events: a tab comes ----

    def attach(self, tab: Tab, token: object, request: gr.Request | None = None) -> View:
        """A tab opens or reloads, with the token its browser keeps: everything of its room. What
        a guest says is not written to the owner's disk."""
        known = None if tab.version else self.rooms.find(token)
        if known is not None:
            tab.token = known.token
        room = self.room_of(tab)
        room.is_kept = request is None or not is_guest(request)
        room.touch()
        return self.look(tab)

    def tick(self, tab: Tab) -> Any:
        """Once a second: tell the tab to look when its room has changed elsewhere."""
        if not tab.version:
            return gr.skip()  # it has not said yet which room is its own
        room = self.room_of(tab)
        room.touch()
        if tab.version == room.version and (tab.is_streaming or not room.is_running):
            return gr.skip()
        return next_line(tab, room, "look")

    def look(self, tab: Tab, box: object = "") -> View:
        """Show what has changed; box: what is being written."""
        view = self._view(tab)
        return view._replace(box=returned(self.room_of(tab).take_returned(), box))

    async def stream(self, tab: Tab) -> Updates:
        """About 25 updates a second until the answer has ended. Any number of tabs may; closing
        one only ends its view."""
        room = self.room_of(tab)
        if tab.is_streaming or not room.is_running:
            return
        tab.is_streaming = tab.has_live = True
        room.enter()
        try:
            async for update in self._updates(tab, room):
                yield update
        finally:
            tab.is_streaming = False
            room.leave()

    async def _updates(self, tab: Tab, room: ChatSession) -> Updates:
        answer, told, sent = room.answer, 0.0, 0
        before: tuple[str, int, int] | None = None
        while True:
            is_over = room.answer is not answer or not room.is_running
            if not is_over:
                room.fold(self._waiting_for)
            steps, version = len(answer.steps), room.version
            now, state = time.monotonic(), (answer.live, steps, version)
            if state != before or now > told + KEEP_ALIVE_SECONDS or is_over:
                before, told = state, now
                known = sent if self.answer_of(tab) is answer else 0
                panel = self._panel(tab, since=known)
                changed = version if version != tab.version and not is_over else 0
                yield Update(answer.live, said(answer.text), panel, changed)
                sent = steps
            if is_over:
                return
            spent = time.monotonic() - now
            await asyncio.sleep(max(POLL_SECONDS - spent, POLL_SECONDS / 2))

    # ---- events: what a person does ----

    def begin(self, tab: Tab, text: object, *settings: object) -> View:
        """Send a message, or let it wait for the end of the answer that runs."""
        posted = {"text": text}
        view, is_done = self._do(tab, ChatSession.ask, settings, posted)
        return view._replace(box="") if is_done else view

    def regenerate(self, tab: Tab, *settings: object) -> View:
        """Answer the last message again."""
        return self._do(tab, ChatSession.regenerate, settings)[0]

    def proceed(self, tab: Tab, *settings: object) -> View:
        """Go on with the last answer."""
        return self._do(tab, ChatSession.proceed, settings)[0]

    def undo(self, tab: Tab) -> View:
        """Take the last turn back into the box."""
        try:
            text = self.room_of(tab).undo()
        except MedusaChatError as error:
            return self._refused(tab, error)
        return self._view(tab)._replace(box=text)

    def edit(self, tab: Tab, event: gr.EventData, *settings: object) -> View:
        """A row of the conversation was edited."""
        tab.talk_version = 0  # what the browser shows is not what is there: draw it anew
        try:
            row = self._row(self.room_of(tab), _of(event, "index"))
        except (MedusaChatError, IndexError):
            return self._view(tab)
        if row.kind != "text":
            gr.Info("Only what was said can be edited.")
            return self._view(tab)
        posted = {"text": _of(event, "value")}
        return self._do(tab, lambda room, i: room.edit(row.position, i), settings, posted)[0]

    def clear(self, tab: Tab) -> View:
        """A new conversation."""
        self.room_of(tab).clear()
        return self._view(tab)._replace(box="")

    def stop(self, tab: Tab) -> None:
        """End the answer at its next step; the text so far is kept."""
        self.room_of(tab).stop()

    def drop(self, tab: Tab, event: gr.EventData) -> View:
        """Forget a message that waits."""
        try:
            place = checked({"place": _of(event, "place")}, self.trees).place
        except MedusaChatError:
            place = None
        if place is not None:
            self.room_of(tab).drop(place)
        return self._view(tab)

    def say_system(self, tab: Tab, system: object) -> None:
        """The system prompt was written; it goes with the next message."""
        try:
            text = checked({"system": system}, self.trees).system
        except MedusaChatError as error:
            gr.Warning(str(error))
            return
        tab.system = text
        self.room_of(tab).say_system(text)

    def pick(self, tab: Tab, event: gr.EventData) -> str:
        """The panel with the step the user chose; without one the latest."""
        try:
            step = checked({"step": _of(event, "step")}, self.trees).step
        except MedusaChatError:
            step = None
        return self._panel(tab, step)

    async def peek(self, tab: Tab, event: gr.EventData) -> str:
        """What the model would have said at the node the user clicked."""
        answer = self.answer_of(tab)
        return await card_line(self.session, answer, _of(event, "step"), _of(event, "node"))

    def choose(self, tab: Tab, event: gr.EventData) -> Any:
        """A row of the conversation was clicked: the panel shows that answer."""
        room = self.room_of(tab)
        try:
            answer = room.talk.answers.get(self._row(room, _of(event, "index")).position)
        except (MedusaChatError, IndexError):
            return gr.skip()
        if answer is None or not answer.steps or room.is_running:
            return gr.skip()
        tab.looks_at = answer
        return self._panel(tab)

    # ---- what they share ----

    def _do(
        self,
        tab: Tab,
        act: Callable[[ChatSession, Inputs], None],
        settings: Sequence[object],
        posted: Mapping[str, object] = MappingProxyType({}),
    ) -> tuple[View, bool]:
        """Check what was posted and do it: (what became of it, whether it was done)."""
        try:
            chosen = dict(zip(SETTINGS, settings, strict=True))
            act(self.room_of(tab), checked(chosen | dict(posted), self.trees))
        except MedusaChatError as error:
            return self._refused(tab, error), False
        return self._view(tab), True

    def _refused(self, tab: Tab, error: MedusaChatError) -> View:
        view = self._view(tab)
        if self.room_of(tab).is_running:
            gr.Info(str(error))
            return view
        return view._replace(live=error_line(str(error)))

    def _view(self, tab: Tab) -> View:
        return view_of(tab, self.room_of(tab), lambda: self._panel(tab))

    def _row(self, room: ChatSession, place: object) -> Row:
        """The row of a place that was posted. Raises UsageError or IndexError."""
        checked_place = checked({"place": place}, self.trees).place
        if checked_place is None:
            raise IndexError
        return rows_of(room.talk)[checked_place]

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
        if answer.prefilled is None and not self.room_of(tab).is_running:
            return ""
        return panel_line(answer, self.plain_of(answer), step, since)

    def _measure(self, answer: Answer) -> None:
        """Remember the plain speed when the answer was one."""
        if answer.plain_rate and answer.model_key:
            self.measured_plain(answer.model_key, answer.plain_rate)


def _of(event: gr.EventData, name: str) -> object:
    """A field of what an event brought; None when it brought none."""
    data = getattr(event, "_data", None)
    return data.get(name) if isinstance(data, dict) else None
