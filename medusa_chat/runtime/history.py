"""Conversations on disk (sqlite, WAL): one row per browser, each written whole or not at all."""

import hashlib
import json
import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from medusa_chat.messages import Message

FILE = "chats.sqlite3"
BUSY_SECONDS = 5.0
TABLE = """
CREATE TABLE IF NOT EXISTS chats (
    browser TEXT PRIMARY KEY, saved_at REAL NOT NULL, chat TEXT NOT NULL
) WITHOUT ROWID
"""
SAVE = "INSERT OR REPLACE INTO chats VALUES (?, ?, ?)"


@dataclass(frozen=True)
class StoredConversation:
    """One conversation. notes: by position of the message they belong to. system: its prompt."""

    messages: tuple[Message, ...] = ()
    notes: dict[int, str] = field(default_factory=dict)
    system: str = ""


class History:
    """The conversations of every browser that talked to this machine's owner's pages.

    A browser is found by the hash of its token, so that a reader of the file cannot take its place.
    The first failure to write or read is told through `tell`; none stops the chat.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] | None = None) -> None:
        self.file = file
        self._tell = tell or (lambda line: print(line, file=sys.stderr))
        self._told = False
        self._lock = threading.Lock()

    def save(self, token: str, kept: StoredConversation) -> bool:
        """Write one conversation; False when it could not be kept."""
        chat = {"messages": kept.messages, "notes": kept.notes, "system": kept.system}
        row = (_name(token), time.time(), json.dumps(chat, ensure_ascii=False))
        try:
            with self._lock, closing(self._open()) as base, base:
                base.execute(SAVE, row)
        except (OSError, sqlite3.Error, UnicodeError) as error:
            self._say(f"the conversations are not kept on disk ({error}): see {self.file}")
            return False
        return True

    def load(self, token: str) -> StoredConversation | None:
        """The conversation of a browser; None when there is none that can be read."""
        if not self.file.exists():
            return None
        try:
            with self._lock, closing(self._open()) as base:
                row = base.execute("SELECT chat FROM chats WHERE browser = ?", (_name(token),))
                found = row.fetchone()
            return None if found is None else _checked(json.loads(found[0]))
        except (OSError, sqlite3.Error, ValueError) as error:
            self._say(f"a conversation in {self.file} cannot be read ({error})")
            return None

    def all(self) -> list[StoredConversation]:
        """Every conversation that can be read, the latest first."""
        if not self.file.exists():
            return []
        try:
            with self._lock, closing(self._open()) as base:
                rows = base.execute("SELECT chat FROM chats ORDER BY saved_at DESC").fetchall()
        except (OSError, sqlite3.Error) as error:
            self._say(f"the conversations in {self.file} cannot be read ({error})")
            return []
        found: list[StoredConversation] = []
        for (chat,) in rows:
            try:
                found.append(_checked(json.loads(chat)))
            except ValueError as error:
                self._say(f"a conversation in {self.file} cannot be read ({error})")
        return found

    def _open(self) -> sqlite3.Connection:
        """A connection; a file that is no database any more is set aside, never deleted."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return _connected(self.file)
        except sqlite3.OperationalError:
            raise  # a full disk or a folder that cannot be written: not the file's fault
        except sqlite3.DatabaseError as error:
            aside = self.file.with_name(f"{FILE}.corrupt-{time.time_ns()}")
            self.file.replace(aside)
            for suffix in ("-wal", "-shm"):
                self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
            self._say(f"{self.file} is broken ({error}): it was set aside as {aside.name}")
            return _connected(self.file)

    def _say(self, line: str) -> None:
        if not self._told:
            self._told = True
            self._tell(line)


def _connected(file: Path) -> sqlite3.Connection:
    base = sqlite3.connect(file, timeout=BUSY_SECONDS)
    try:
        base.execute("PRAGMA journal_mode = WAL")
        base.execute("PRAGMA synchronous = FULL")
        base.execute(TABLE)
    except sqlite3.Error:
        base.close()
        raise
    return base


def _name(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def _checked(chat: Any) -> StoredConversation:
    """Strictly what was written; raises ValueError for anything else."""
    try:
        messages = tuple(
            {"role": message["role"], "content": message["content"]} for message in chat["messages"]
        )
        notes = {int(place): note for place, note in chat["notes"].items()}
        texts = [*(m["content"] for m in messages), *notes.values(), chat["system"]]
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it lacks {error}") from error
    roles_are_known = {message["role"] for message in messages} <= {"user", "assistant"}
    if not roles_are_known or not all(isinstance(text, str) for text in texts):
        raise ValueError("it holds something that is no message")
    return StoredConversation(messages, notes, chat["system"])
