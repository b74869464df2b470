"""ConversationList: what a list of conversations shows, and what is done there. No gradio.

A conversation that was deleted can be brought back for a while; then it is removed from the disk.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from medusa_chat.errors import UsageError
from medusa_chat.runtime.stored_conversation import Listed, StoredConversation, holds
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.conversations_file import read, written
from medusa_chat.ui.chat.session_store import OWNER, SessionStore
from medusa_chat.ui.page.tree_view import to_line

EVERY = 1_000_000  # conversations: more than anybody has
UNDO_SECONDS = 120.0  # the page offers it for ten; over a slow link it comes late


class Entry(NamedTuple):
    """A conversation in the list. excerpt: where a search was found beside the title."""

    id: str
    title: str
    updated_at: float
    is_running: bool
    excerpt: str


class ConversationList:
    """The lists of all scopes of one store of sessions. What was deleted before it began to run is
    removed too."""

    def __init__(self, sessions: SessionStore) -> None:
        self.sessions = sessions
        self._removals: dict[str, threading.Timer] = {}
        self._purge()
        self._later(self._purge)  # what was deleted just before the last program ended

    def entries(self, scope: str, search: str = "", most: int = 200) -> tuple[list[Entry], bool]:
        """(those that hold all words of `search`, the latest first; whether there are more
        than `most`)."""
        history = self.sessions.history if scope == OWNER else None
        open_ones = {chat.id: chat for chat in self.sessions.all(scope)}
        listed = {one.id: one for one in (history.listed(search, most + 1) if history else ())}
        for chat in open_ones.values():
            if chat.id not in listed and _is_listed(chat, search):
                kept = chat.stored
                listed[chat.id] = Listed(chat.id, kept.title, chat.updated_at, kept.excerpt(search))
        rows = sorted(listed.values(), key=lambda one: -one.updated_at)
        running = {id for id, chat in open_ones.items() if chat.is_running}
        hidden = {id for id, chat in open_ones.items() if chat.is_deleted}
        shown = [
            Entry(*one[:3], one.id in running, one.excerpt) for one in rows if one.id not in hidden
        ]
        return shown[:most], len(shown) > most

    def written(self, scope: str) -> str:
        """All conversations of a scope as one file, the latest first."""
        return written(self._every(scope))

    def _every(self, scope: str) -> Iterator[tuple[str, StoredConversation]]:
        history, open_ones = self.sessions.history, {c.id: c for c in self.sessions.all(scope)}
        for id in [entry.id for entry in self.entries(scope, most=EVERY)[0]]:
            if (chat := open_ones.get(id)) is not None:
                self.sessions.refresh(chat)
                kept = None if chat.is_deleted else chat.stored
            else:
                kept = history.load(id) if history else None
            if kept is not None:
                yield id, kept

    def add(self, data: bytes, trees: Sequence[str]) -> str:
        """Take in the owner's conversations from a file; in words, how many, and what of another
        program's was left out. Raises UsageError."""
        file, history = read(data, trees), self.sessions.history
        conversations = file.conversations
        taken = {chat.id for chat in self.sessions.all(OWNER)}
        self.sessions.require_own()
        added = history.add(conversations, taken) if history else None
        if added is None:
            raise UsageError("it could not be saved, as every conversation here: see the terminal")
        self.sessions.note_change(OWNER)
        known = f", {len(conversations) - added} here already" if added < len(conversations) else ""
        line = f"{added} conversation{'' if added == 1 else 's'} added{known}"
        return "; ".join(filter(None, (line, file.left_out_line)))

    def rename(self, scope: str, id: object, title: str) -> None:
        """Give a conversation a title; an empty one: that of its first message again. Raises
        UsageError where another program has it open."""
        chat = self.sessions.find(scope, id)
        if chat is not None:
            self.sessions.require_writable(chat)
            chat.rename(title)

    def delete(self, scope: str, id: object) -> None:
        """Take a conversation out of the list, if it is there; its answer ends. Raises UsageError
        where another program has it open."""
        chat = self.sessions.find(scope, id)
        if chat is not None:
            self.sessions.require_writable(chat)
            chat.end()
            chat.set_deleted(True)
            self._keep(chat.id)
            self._removals[chat.id] = self._later(self._remove, chat)

    def restore(self, scope: str, id: object) -> ChatSession | None:
        """Bring a deleted conversation back; None when it is too late."""
        for chat in self.sessions.all(scope):
            if chat.id == id and chat.is_deleted:
                self._keep(chat.id)
                chat.set_deleted(False)
                return chat
        return None

    def _keep(self, id: str) -> None:
        """Do not remove it, as an earlier deletion would."""
        if (timer := self._removals.pop(id, None)) is not None:
            timer.cancel()

    def _remove(self, chat: ChatSession) -> None:
        """Remove a conversation that nobody brought back."""
        self._removals.pop(chat.id, None)
        if self.sessions.forget(chat):
            self._purge()

    def _later(self, act: Callable[..., None], *values: Any) -> threading.Timer:
        """Do something once nothing that was deleted by now can be brought back."""
        timer = threading.Timer(UNDO_SECONDS, act, values)
        timer.daemon = True
        timer.start()
        return timer

    def _purge(self) -> None:
        history, steps = self.sessions.history, self.sessions.steps
        for gone in history.purge(UNDO_SECONDS) if history else ():
            if steps:
                steps.delete(gone)


def _is_listed(chat: ChatSession, search: str) -> bool:
    return not chat.is_empty and not chat.is_deleted and holds(chat.stored.words, search)


def list_line(entries: Sequence[Entry], shown: ChatSession, tab: Tab, is_more: bool) -> str:
    """JSON for the list: rows of [id, title, Unix time, whether an answer runs, excerpt]; which
    one is shown, its title, and whether it has a system prompt; the tab's key, and whether the
    list takes a file."""
    current = {"current": shown.id, "title": shown.stored.title, "system": bool(shown.system)}
    current |= {"key": tab.key, "takes": shown.scope == OWNER}
    return to_line({"rows": entries, "search": tab.search, "more": is_more, **current})
