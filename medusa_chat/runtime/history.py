"""The owner's conversations on disk (sqlite, WAL): a row each, written whole or not at all."""

import sqlite3
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from medusa_chat.runtime.old_history import take_over
from medusa_chat.runtime.stored_conversation import Listed, StoredConversation

FILE = "chats.sqlite3"
BUSY_SECONDS = 5.0
TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
    deleted_at REAL, words TEXT NOT NULL, body TEXT NOT NULL
)
"""
INDEX = "CREATE INDEX IF NOT EXISTS newest ON conversations (updated_at)"
SAVE = """
INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    title = excluded.title, updated_at = excluded.updated_at, body = excluded.body,
    words = excluded.words, deleted_at = excluded.deleted_at
"""
LIST = """
SELECT id, title, updated_at FROM conversations
WHERE deleted_at IS NULL AND instr(words, ?) ORDER BY updated_at DESC, rowid DESC LIMIT ?
"""
READ = "SELECT body, created_at, updated_at FROM conversations WHERE deleted_at IS NULL"
DELETED = "FROM conversations WHERE deleted_at IS NOT NULL AND (? IS NULL OR id = ?)"


class History:
    """The conversations of this data folder's owner, by id; what guests say is never here.

    The first failure to write or read is told through `tell`; none stops the chat.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] | None = None) -> None:
        self.file = file
        self._tell = tell or (lambda line: print(line, file=sys.stderr))
        self._told = False
        self._lock = threading.Lock()

    def save(self, id: str, kept: StoredConversation, is_deleted: bool = False) -> bool:
        """Write one conversation; False when it could not be kept. is_deleted: it is in no
        list, and removed by the next `purge`."""
        times = (kept.created_at, kept.updated_at, time.time() if is_deleted else None)
        row = (id, kept.title, *times, kept.words, kept.to_line())
        return self._write(lambda base: base.execute(SAVE, row))

    def load(self, id: str) -> StoredConversation | None:
        """A conversation; None when there is none that can be read."""
        rows = self._rows(f"{READ} AND id = ?", (id,))
        return self._checked(rows[0]) if rows else None

    def all(self) -> list[StoredConversation]:
        """Every conversation that can be read, the latest first."""
        rows = self._rows(f"{READ} ORDER BY updated_at DESC, rowid DESC")
        return [found for row in rows if (found := self._checked(row)) is not None]

    def listed(self, search: str = "", most: int = -1) -> list[Listed]:
        """Conversations whose title or messages hold `search`, latest first. most: -1 for all."""
        return [Listed(*row) for row in self._rows(LIST, (search.casefold(), most))]

    def purge(self, id: str | None = None) -> list[str]:
        """Remove what was deleted from the disk: one conversation, or all such; their ids."""
        if not self.file.exists():
            return []
        found: list[str] = []

        def purge(base: sqlite3.Connection) -> None:
            rows = base.execute(f"SELECT id {DELETED}", (id, id)).fetchall()
            found.extend(gone for (gone,) in rows)
            if found:
                base.execute(f"DELETE {DELETED}", (id, id))

        self._write(purge)
        return found

    def _write(self, act: Callable[[sqlite3.Connection], object]) -> bool:
        try:
            with self._lock:
                try:
                    self._commit(act)
                except sqlite3.DatabaseError as error:
                    self._set_aside(error)
                    self._commit(act)
        except (OSError, sqlite3.Error, UnicodeError) as error:
            self._say(f"the conversations cannot be saved ({error}): check {self.file}")
            return False
        return True

    def _commit(self, act: Callable[[sqlite3.Connection], object]) -> None:
        with closing(self._open()) as base, base:
            act(base)

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a query; none, with a message, if the file cannot be read."""
        if not self.file.exists():
            return []
        try:
            with self._lock, closing(self._open()) as base:
                return base.execute(query, values).fetchall()
        except (OSError, sqlite3.Error) as error:
            self._say(f"the conversations in {self.file} cannot be read ({error})")
            return []

    def _checked(self, row: tuple[str, float, float]) -> StoredConversation | None:
        """Strictly what was written; None, and said, for anything else."""
        try:
            return StoredConversation.from_line(*row)
        except ValueError as error:
            self._say(f"a conversation in {self.file} cannot be read ({error})")
            return None

    def _open(self) -> sqlite3.Connection:
        """A connection; a file that is no database any more is set aside, never deleted."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        try:
            return self._connected()
        except sqlite3.DatabaseError as error:
            self._set_aside(error)
            return self._connected()

    def _set_aside(self, error: sqlite3.DatabaseError) -> None:
        """Move a broken file away; raises the error where the file is not at fault: its subclasses
        tell of a full disk, a lock, or a folder that cannot be written."""
        if type(error) is not sqlite3.DatabaseError:
            raise error
        aside = self.file.with_name(f"{FILE}.corrupt-{time.time_ns()}")
        self.file.replace(aside)
        for suffix in ("-wal", "-shm"):
            self.file.with_name(self.file.name + suffix).unlink(missing_ok=True)
        self._say(f"{self.file} is broken ({error}): it was set aside as {aside.name}")

    def _connected(self) -> sqlite3.Connection:
        base = sqlite3.connect(self.file, timeout=BUSY_SECONDS)
        try:
            base.execute("PRAGMA journal_mode = WAL")
            base.execute("PRAGMA synchronous = FULL")
            base.execute("PRAGMA secure_delete = ON")
            base.execute(TABLE)
            base.execute(INDEX)
            take_over(base, self._say)
        except BaseException:
            base.close()
            raise
        return base

    def _say(self, line: str) -> None:
        if not self._told:
            self._told = True
            self._tell(line)
