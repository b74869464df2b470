"""ConversationEvents: what the list of conversations and the versions of messages do."""

import time
from collections.abc import Callable
from typing import Any

import gradio as gr

from medusa_chat.errors import MedusaChatError, UsageError
from medusa_chat.ui.access.guard import OWNER
from medusa_chat.ui.access.notices import inform, warn
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.saved_file import ReplayFile, SavedFile
from medusa_chat.ui.chat.view import View, rows_of
from medusa_chat.ui.chat.viewer import ChatViewer
from medusa_chat.ui.page.html_blocks import event_field
from medusa_chat.ui.page.inputs import ListInputs, checked_list, whole_number
from medusa_chat.ui.page.shell import given
from medusa_chat.ui.page.tree_view import to_line

LISTED_MORE = 200


class ConversationEvents(ChatViewer):
    """Everything a browser posts is checked, and only conversations of the tab's scope are found:
    what is none of them changes nothing."""

    def writable(self, tab: Tab) -> ChatSession:
        """The conversation a tab shows, to be changed. Raises UsageError where another program has
        it open, or has changed it since it was shown."""
        chat = self.session_of(tab)
        self.sessions.require_writable(chat)
        return chat

    def new(self, tab: Tab, settings: dict[str, Any]) -> View:
        """Show an empty conversation, with the settings that are on the page; the one that was
        shown stays. Where it is empty itself and no other tab's, it stays shown."""
        chat = self.session_of(tab)
        if not chat.is_empty or chat.is_running or self._is_shared(tab):
            chat = self.sessions.open(tab.scope)
            chat.set_settings(settings)
            self._turn(tab, chat)
        elif chat.is_temporary:
            chat.set_temporary(False)
        return self._view(tab)

    def new_temporary(self, tab: Tab, settings: dict[str, Any]) -> View:
        """As `new`; the empty conversation is never stored, and gone once no tab shows it."""
        self.new(tab, settings)
        self.session_of(tab).set_temporary(True)
        return self._view(tab)

    def open_conversation(self, tab: Tab, event: gr.EventData) -> View:
        """Show a conversation of the list, or of an address that the browser went back to."""
        chat = self.sessions.find(tab.scope, self._posted(event).id)
        if chat is None:
            inform("This conversation was deleted.")
        else:
            self.sessions.refresh(chat)
        if chat is not None and chat.id != tab.conversation and not chat.is_deleted:
            self._turn(tab, chat)
        return self._seen(tab)

    def branch(self, tab: Tab, event: gr.EventData) -> View:
        """Go on from a message in a conversation of its own; the one that was shown stays."""
        chat, row = self.session_of(tab), whole_number(event_field(event, "row"))
        shown = rows_of(chat.transcript)
        if row is not None and 0 <= row < len(shown):
            self._turn(tab, self.sessions.branch(chat, shown[row].position + 1))
        return self._view(tab)

    def rename_conversation(self, tab: Tab, event: gr.EventData) -> View:
        """Give a conversation another title."""
        posted = self._posted(event)
        return self._change_list(tab, lambda: self.list.rename(tab.scope, posted.id, posted.title))

    def save_conversation(self, tab: Tab, event: gr.EventData) -> Any:
        """A conversation as a file, for the browser to keep."""
        chat = self.sessions.find(tab.scope, self._posted(event).id)
        if chat is None:
            return gr.skip()
        return to_line({"at": time.time(), **SavedFile.of(chat.stored)._asdict()})

    def save_replay(self, tab: Tab, event: gr.EventData) -> Any:
        """An answer with its steps as an HTML file, for the browser to keep."""
        chat, row = self.session_of(tab), whole_number(event_field(event, "row"))
        shown = rows_of(chat.transcript)
        if row is None or not 0 <= row < len(shown):
            return gr.skip()
        position = shown[row].position
        answer = chat.transcript.answers.get(position)
        if answer is None or not self.sessions.recall(chat, answer) or not answer.steps:
            inform("The steps of this answer are no longer stored.")
            return gr.skip()
        asked = [one for one in chat.transcript.messages[:position] if one["role"] == "user"]
        question = asked[-1]["content"] if asked else ""
        about = (question, chat.stored.title, self.plain_of(answer), given())
        return to_line({"at": time.time(), **ReplayFile.of(answer, *about)._asdict()})

    def save_all(self, key: str) -> str | None:
        """All conversations of who has the tab with this key, as a file; None without one."""
        return self.list.written(tab.scope) if (tab := self.tab_of(key)) else None

    def take_file(self, key: str, data: bytes) -> str | None:
        """Take in the conversations of a file; how many, in words. None without a tab of the
        owner's: a guest's end with the link. Raises UsageError."""
        tab = self.tab_of(key)
        return self.list.add(data, self.trees) if tab and tab.scope == OWNER else None

    def delete_conversation(self, tab: Tab, event: gr.EventData) -> View:
        """Move a conversation to the bin. An empty one is shown where it was."""
        posted = self._posted(event)

        def delete() -> None:
            tab.undeleted = (str(posted.id), time.time())  # till it is done
            self.list.delete(tab.scope, posted.id)
            tab.undeleted = ("", 0.0)

        return self._change_list(tab, delete)

    def restore_conversation(self, tab: Tab, event: gr.EventData) -> View:
        """Bring a conversation back from the bin, and show it where nothing else is shown."""
        id, shown = self._posted(event).id, self.session_of(tab)

        def restore() -> None:
            if (chat := self.list.restore(tab.scope, id)) is None:
                raise UsageError("This conversation can no longer be restored.")
            if shown.is_empty:
                self._turn(tab, chat)

        return self._change_list(tab, restore)

    def show_bin(self, tab: Tab, event: gr.EventData) -> View:
        """List what lies in the bin, or the conversations again."""
        tab.shows_bin, tab.list_version = event_field(event, "shown") is True, -1
        return self._view(tab)

    def empty_bin(self, tab: Tab) -> View:
        """Remove for good what lies in the bin: the page has asked for a second click."""
        return self._change_list(tab, lambda: self.list.empty_bin(tab.scope))

    def pin_conversation(self, tab: Tab, event: gr.EventData) -> View:
        """Have a conversation stand first in the list, or no longer."""
        posted, is_pinned = self._posted(event), event_field(event, "pinned") is True
        return self._change_list(tab, lambda: self.list.pin(tab.scope, posted.id, is_pinned))

    def search_conversations(self, tab: Tab, event: gr.EventData) -> View:
        """List those that hold a text; more: show older ones too."""
        posted = self._posted(event)
        tab.listed = tab.listed + LISTED_MORE if posted.more else LISTED_MORE
        tab.search, tab.list_version = posted.search, -1
        return self._view(tab)

    def keep_settings(self, tab: Tab, settings: dict[str, Any]) -> None:
        """The settings of the conversation that is shown were changed."""
        if tab.version:
            self.session_of(tab).set_settings(settings)

    def show_version(self, tab: Tab, event: gr.EventData) -> View:
        """Show another version of a message."""
        row, version = (whole_number(event_field(event, name)) for name in ("row", "version"))
        try:
            chat = self.session_of(tab)
            if row is not None and version is not None:
                chat.show_version(rows_of(chat.transcript)[row].position, version)
        except MedusaChatError as error:
            inform(str(error))
        except IndexError:
            pass  # the conversation has changed meanwhile: it is drawn anew
        return self._view(tab)

    def _posted(self, event: gr.EventData) -> ListInputs:
        """The checked inputs of a list event; invalid ones give a warning and no inputs."""
        names = ("id", "title", "search", "more")
        try:
            return checked_list({name: event_field(event, name) for name in names})
        except MedusaChatError as error:
            warn(str(error))
            return ListInputs()

    def _change_list(self, tab: Tab, act: Callable[[], None]) -> View:
        """Change the list; where that is refused, say why and draw the list anew."""
        try:
            act()
        except MedusaChatError as error:
            warn(str(error))
            tab.list_version = -1
        return self._view(tab)

    def _is_shared(self, tab: Tab) -> bool:
        """Whether another tab shows the same conversation."""
        shown = (tab.scope, tab.conversation)
        others = [other for other in self._tabs.values() if other is not tab]
        return any((other.scope, other.conversation) == shown for other in others)

    def _turn(self, tab: Tab, chat: ChatSession) -> None:
        """Show another conversation in a tab."""
        before, is_left = self.session_of(tab), not self._is_shared(tab)
        tab.turn_to(chat)
        before.turn_away()
        if before.is_temporary and is_left and before is not chat:
            self.sessions.forget(before.scope, before.id)

    def _seen(self, tab: Tab) -> View:
        self.session_of(tab).touch()
        return self.refresh(tab)
