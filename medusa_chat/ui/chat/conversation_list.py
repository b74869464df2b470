"""ConversationList: what a list of conversations shows, and what is done there. No gradio.

A conversation that was deleted lies in the bin; after 30 days it is removed from the disk. Those of
a guest lie there in memory, as long as there is room for them.
"""

import math
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from medusa_chat.errors import UsageError
from medusa_chat.runtime.history import BIN_SECONDS
from medusa_chat.runtime.stored_conversation import (
    Binned,
    Listed,
    StoredConversation,
    holds,
    marked,
)
from medusa_chat.ui.chat.browser_tab import Tab
from medusa_chat.ui.chat.chat_session import ChatSession
from medusa_chat.ui.chat.conversations_file import read, written
from medusa_chat.ui.chat.session_store import OWNER, SessionStore
from medusa_chat.ui.page.tree_view import to_line

EVERY = 1_000_000  # conversations: more than anybody has
LATE_SECONDS = 120.0  # over a slow link the wish to restore comes late
PURGE_SECONDS = 3600.0  # between two looks for what has left the bin


class Entry(NamedTuple):
    """A conversation in the list. found, excerpt: title and text around a match elsewhere, both in
    pieces as `marked` makes them; empty without a search."""

    id: str
    title: str
    updated_at: float
    is_running: bool
    is_pinned: bool
    found: Sequence[str] = ()
    excerpt: Sequence[str] = ()


class ConversationList:
    """The lists and the bins of all scopes of one store of sessions."""

    def __init__(self, sessions: SessionStore) -> None:
        self.sessions = sessions
        self._purged_at = 0.0
        self._purge(LATE_SECONDS)

    def entries(self, scope: str, search: str = "", most: int = 200) -> tuple[list[Entry], bool]:
        """(those that hold all words of `search`, pinned ones first, then the latest; whether
        there are more than `most`)."""
        history = self.sessions.history if scope == OWNER else None
        if history and time.monotonic() > self._purged_at + PURGE_SECONDS:
            self._purge(LATE_SECONDS)
        open_ones = {chat.id: chat for chat in self.sessions.all(scope)}
        listed = {one.id: one for one in (history.listed(search, most + 1) if history else ())}
        for chat in open_ones.values():
            if chat.id not in listed and _is_listed(chat, search):
                kept, at = chat.stored, chat.updated_at
                own = (kept.title, at, kept.excerpt(search), kept.is_pinned)
                listed[chat.id] = Listed(chat.id, *own)
        rows = sorted(listed.values(), key=lambda one: (not one.is_pinned, -one.updated_at))
        running = {id for id, chat in open_ones.items() if chat.is_running}
        hidden = {id for id, chat in open_ones.items() if chat.is_deleted}
        shown = [one for one in rows if one.id not in hidden]
        return [
            Entry(*one[:3], one.id in running, bool(one.is_pinned), *_found(one, search))
            for one in shown[:most]
        ], len(shown) > most

    def binned(self, scope: str) -> list[Binned]:
        """What lies in the bin, the latest there first."""
        history = self.sessions.history if scope == OWNER else None
        binned = {one.id: one for one in (history.binned() if history else ())}
        until = time.time() + BIN_SECONDS
        for chat in self.sessions.all(scope):
            if chat.id in binned and not chat.is_deleted:
                del binned[chat.id]  # it was brought back, and the disk did not take that
            elif chat.id not in binned and chat.is_deleted and not chat.is_empty:
                binned[chat.id] = Binned(chat.id, chat.stored.title, until)
        return list(binned.values())

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
            raise UsageError("nothing can be saved to this disk: the terminal says why")
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
        """Move a conversation to the bin, if it is there; its answer ends. Raises UsageError where
        another program has it open."""
        chat = self.sessions.find(scope, id)
        if chat is not None:
            self.sessions.require_writable(chat)
            chat.end()
            chat.set_deleted(True)

    def restore(self, scope: str, id: str) -> ChatSession | None:
        """Bring a conversation back from the bin; None where it is no longer there. Raises
        UsageError where another program has it open."""
        for chat in self.sessions.all(scope):
            if chat.id == id and chat.is_deleted:
                chat.set_deleted(False)
                return chat
        history = self.sessions.history if scope == OWNER else None
        if history is None:
            return None
        self.sessions.require_own()
        history.restore(id)
        self.sessions.note_change(scope)
        return self.sessions.find(scope, id)

    def empty_bin(self, scope: str) -> None:
        """Remove for good what lies in the bin, with its steps. Raises UsageError where another
        program has the conversations open."""
        if scope == OWNER and self.sessions.history:
            self.sessions.require_own()
            self._purge(-math.inf)
        for one in self.binned(scope):  # of a guest, or where nothing is stored
            self.sessions.forget(scope, one.id)
        self.sessions.note_change(scope)

    def pin(self, scope: str, id: object, is_pinned: bool) -> None:
        """Have a conversation stand first in the list, or where its age puts it. Raises UsageError
        where another program has it open."""
        chat = self.sessions.find(scope, id)
        if chat is not None:
            self.sessions.require_writable(chat)
            chat.set_pinned(is_pinned)

    def _purge(self, seconds: float) -> None:
        self._purged_at = time.monotonic()
        history, steps = self.sessions.history, self.sessions.steps
        # Open ones were brought back, whether or not the disk took that.
        kept = {chat.id for chat in self.sessions.all(OWNER) if not chat.is_deleted}
        for gone in history.purge(seconds, kept) if history else ():
            self.sessions.forget(OWNER, gone)
            if steps:
                steps.delete(gone)


def _is_listed(chat: ChatSession, search: str) -> bool:
    is_shown = not chat.is_empty and not chat.is_deleted and not chat.is_temporary
    return is_shown and holds(chat.stored.words, search)


def _found(one: Listed, search: str) -> tuple[Sequence[str], Sequence[str]]:
    """Title and excerpt, with the words of a search marked."""
    if not search:
        return (), ()
    return marked(one.title, search), marked(one.excerpt, search) if one.excerpt else ()


def list_line(
    entries: Sequence[Entry], binned: Sequence[Binned], shown: ChatSession, tab: Tab, is_more: bool
) -> str:
    """JSON for the list: rows of an Entry's fields; which conversation is shown, its title, whether
    it has a system prompt and is temporary, its preset; the tab's key, and whether the list takes a
    file. bin: how many lie there; binned: rows of [id, title, days left] where the tab shows it,
    else null. undeleted: [the id of a row whose deletion was refused, when]."""
    current = {"current": shown.id, "title": shown.stored.title, "system": bool(shown.system)}
    current |= {"key": tab.key, "takes": shown.scope == OWNER, "temporary": shown.is_temporary}
    now = time.time()
    rows = [[one.id, one.title, math.ceil((one.until - now) / 86400)] for one in binned]
    current["preset"] = shown.settings.get("preset", "")
    current["undeleted"] = tab.undeleted
    current |= {"bin": len(rows), "binned": rows if tab.shows_bin else None}
    return to_line({"rows": entries, "search": tab.search, "more": is_more, **current})
