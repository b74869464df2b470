"""Takes over the store as it was before there were conversations: one row per browser.

A row (browser: hash of its token, saved_at, chat) becomes a conversation whose id is that hash, so
that the browser it belongs to opens it again. Rows that cannot be read stay where they are.
"""

import hashlib
import json
import sqlite3
from collections.abc import Callable

from medusa_chat.runtime.message_tree import MessageTree
from medusa_chat.runtime.stored_conversation import StoredConversation

VERSION = 1  # of the store, in sqlite's user_version: at 0 nobody has looked for old rows
INSERT = "INSERT OR IGNORE INTO conversations VALUES (?, ?, ?, ?, NULL, ?, ?)"


def take_over(base: sqlite3.Connection, say: Callable[[str], None]) -> None:
    """Make conversations of all old rows, in one transaction: all of them or none."""
    if base.execute("PRAGMA user_version").fetchone()[0] >= VERSION:
        return
    with base:
        base.execute("BEGIN IMMEDIATE")
        if base.execute("SELECT 1 FROM sqlite_master WHERE name = 'chats'").fetchone():
            for browser, saved_at, chat in base.execute("SELECT * FROM chats").fetchall():
                try:
                    kept = _conversation(chat)
                except ValueError as error:
                    say(f"a conversation of an older version cannot be read ({error})")
                    continue
                if kept.tree.said:
                    row = (browser, kept.title, saved_at, saved_at, kept.words, kept.to_line())
                    base.execute(INSERT, row)
                base.execute("DELETE FROM chats WHERE browser = ?", (browser,))
        base.execute(f"PRAGMA user_version = {VERSION}")


def old_name(token: str) -> str:
    """The id of the conversation that a browser with this token had."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _conversation(chat: str) -> StoredConversation:
    """The contents of a row in the old format. Raises ValueError."""
    try:
        found = json.loads(chat)
        notes = {int(place): note for place, note in found["notes"].items()}
        tree = MessageTree.of(found["messages"], notes)
        kept = StoredConversation(MessageTree.from_json(tree.to_json()), found["system"])
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"it lacks {error}") from error
    return StoredConversation.from_line(kept.to_line())
