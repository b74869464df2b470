"""ChatController: what the Chat tab's buttons do. Every input passes `inputs.checked` first."""

from collections.abc import Callable
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.chat.answer import Row
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.conversation_events import ConversationEvents
from medusa_chat.ui.chat.quick_requests import card_line, count_line
from medusa_chat.ui.chat.step_panel import most_telling
from medusa_chat.ui.chat.view import View, error_line, rows_of
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.inputs import Inputs, checked, clean, whole_number
from medusa_chat.ui.page.pace import Pace, usual_pace


class ChatController(ConversationEvents):
    """What the Chat tab's events do, shared by all browser tabs."""

    def send(self, tab: Tab, inputs: Inputs) -> View:
        """Send a message, or let it wait for the end of the answer that runs."""
        tab.heard += 1  # before a look can show its answer
        try:
            self.writable(tab).ask(self._at_pace(tab, inputs))
        except MedusaChatError as error:
            return self.refuse(tab, error)
        tab.take()
        return self._view(tab)

    def refuse_send(self, tab: Tab, error: MedusaChatError) -> View:
        """`refuse` for a message: the box may send the same one again."""
        tab.heard += 1
        return self.refuse(tab, error)

    def regenerate(self, tab: Tab, inputs: Inputs) -> View:
        """Answer the last message again."""
        return self._do(tab, lambda chat: chat.regenerate(self._at_pace(tab, inputs)))

    def proceed(self, tab: Tab, inputs: Inputs) -> View:
        """Go on with the last answer."""
        return self._do(tab, lambda chat: chat.proceed(self._at_pace(tab, inputs)))

    def undo(self, tab: Tab) -> View:
        """Take the last turn back into the box."""
        try:
            tab.give(self.writable(tab).undo())
        except MedusaChatError as error:
            return self.refuse(tab, error)
        return self._view(tab)

    def redo(self, tab: Tab) -> View:
        """Bring back what was taken back last."""
        return self._do(tab, lambda chat: chat.redo())

    def edit(self, tab: Tab, inputs: Inputs) -> View:
        """A row of the conversation was edited: it is drawn anew, whatever becomes of it."""
        tab.transcript_version = 0
        try:
            row = self._row(self.session_of(tab), inputs.row)
        except IndexError:
            return self._view(tab)
        if row.kind != "text":
            inform("Only messages can be edited.")
            return self._view(tab)
        return self._do(tab, lambda chat: chat.edit(row, self._at_pace(tab, inputs)))

    def refuse_edit(self, tab: Tab, error: MedusaChatError) -> View:
        """`refuse` for a row that was edited: the browser must draw it as it was."""
        tab.transcript_version = 0
        return self.refuse(tab, error)

    def stop(self, tab: Tab, shown: object = "") -> None:
        """End the answer at its next step; the text so far is kept. shown: of how many steps, in
        digits, where the tab shows them one by one."""
        is_known = isinstance(shown, str) and shown.isascii() and shown.isdecimal()
        self.session_of(tab).stop(int(shown) if is_known and len(shown) < 8 else None)

    def set_pace(self, tab: Tab, event: gr.EventData) -> None:
        """The pace was chosen; it goes with the next message."""
        tab.pace = Pace.posted(getattr(event, "_data", None), tab.pace)

    def end_show(self, tab: Tab, event: gr.EventData) -> None:
        """The tab has shown an answer to its end."""
        number = whole_number(event_field(event, "answer"))
        if number is not None:
            self.session_of(tab).end_show(number)

    def drop(self, tab: Tab, event: gr.EventData) -> View:
        """Forget a message that waits."""
        place = whole_number(event_field(event, "place"))
        if place is not None:
            self.session_of(tab).drop(place, event_field(event, "text"))
        return self._view(tab)

    def set_system(self, tab: Tab, system: object) -> None:
        """The system prompt was written; it goes with the next message."""
        try:
            text = checked({"system": system}, self.trees).system
            self.writable(tab).set_system(text)
        except MedusaChatError as error:
            warn(str(error))
            return
        tab.system = (text, tab.system[1] if tab.system else "")

    def pick(self, tab: Tab, event: gr.EventData) -> str:
        """The panel with the step the user chose; without one the latest."""
        return self._panel(tab, whole_number(event_field(event, "step")))

    def newest(self, tab: Tab) -> str:
        """The panel with the newest answer, after an earlier one was looked at."""
        tab.chosen_answer = tab.watched = None
        return self._panel(tab)

    async def peek(self, tab: Tab, event: gr.EventData) -> str:
        """What the model would have said at the node the user clicked."""
        answer = self.answer_of(tab)
        at = (event_field(event, "step"), event_field(event, "node"))
        return await card_line(self.session, answer, *at, self.session_of(tab).guest)

    async def count(self, tab: Tab, event: gr.EventData) -> str:
        """How many tokens the message takes that is being written."""
        try:
            text = clean("the message", event_field(event, "text"))
        except MedusaChatError:
            return ""
        number = whole_number(event_field(event, "asked")) or 0
        chat = self.session_of(tab)
        messages = chat.transcript.plus("user", text).prompt(chat.system)
        return await count_line(self.session, messages, number, chat.guest)

    def continue_from(self, tab: Tab, inputs: Inputs) -> View:
        """Go on from another token of a step that is shown, in another version of its answer."""
        answer = self.answer_of(tab)

        def branch_off(chat: ChatSession) -> None:
            chat.branch_off(answer, self._at_pace(tab, inputs))
            tab.chosen_answer = None

        return self._do(tab, branch_off)

    def choose(self, tab: Tab, event: gr.EventData) -> Any:
        """A row of the conversation was clicked: the panel shows that answer. Of a strip: and its
        most telling step."""
        chat = self.session_of(tab)
        try:
            row = self._row(chat, whole_number(event_field(event, "index")))
            answer = chat.transcript.answers.get(row.position)
        except IndexError:
            return gr.skip()
        if answer is None or chat.is_running:
            return gr.skip()
        if not self.sessions.recall(chat, answer):
            inform("The steps of this answer are no longer stored.")
            return gr.skip()
        tab.chosen_answer, tab.watched = answer, None
        is_strip = event_field(event, "strip") is True
        return self._panel(tab, most_telling(answer.steps) if is_strip else None)

    # ---- what they share ----

    def _at_pace(self, tab: Tab, inputs: Inputs) -> Inputs:
        pace = tab.pace or usual_pace(self.session)
        return pace.of(inputs, self.session)

    def _do(self, tab: Tab, act: Callable[[ChatSession], None]) -> View:
        """Do what was asked for, if the chat session does not refuse it."""
        try:
            act(self.writable(tab))
        except MedusaChatError as error:
            return self.refuse(tab, error)
        return self._view(tab)

    def refuse(self, tab: Tab, error: MedusaChatError) -> View:
        """Why nothing was done: where the answer would be, or beside the answer that runs."""
        view = self._view(tab)
        if self.session_of(tab).is_running:
            inform(str(error))
            return view
        tab.refused = (tab.transcript_version, str(error))
        return view._replace(live=error_line(str(error)))

    def _row(self, chat: ChatSession, row: int | None) -> Row:
        """The row that is shown at this place. Raises IndexError."""
        if row is None:
            raise IndexError
        return rows_of(chat.transcript)[row]
