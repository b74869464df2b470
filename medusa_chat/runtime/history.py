"""The owner's conversations on disk (sqlite, WAL): a row each, written whole or not at all."""

import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar

from medusa_chat.runtime.history_file import mend, opened, opened_to_read
from medusa_chat.runtime.stored_conversation import Listed, StoredConversation

T = TypeVar("T")
FILE = "chats.sqlite3"
SAVE = """
INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    title = excluded.title, updated_at = excluded.updated_at, body = excluded.body,
    words = excluded.words, deleted_at = CASE WHEN excluded.deleted_at IS NULL THEN NULL
    ELSE coalesce(conversations.deleted_at, excluded.deleted_at) END
"""
LIST = """
SELECT id, title, updated_at, excerpt(CAST(body AS BLOB), ?) FROM conversations
WHERE deleted_at IS NULL AND holds(CAST(words AS BLOB), ?)
ORDER BY updated_at DESC, rowid DESC LIMIT ?
"""
FOUND = "SELECT body, created_at, updated_at, deleted_at FROM conversations WHERE id = ?"
COUNT = "SELECT count(*) FROM conversations WHERE deleted_at IS NULL AND id = ?"
READ = "SELECT body, created_at, updated_at FROM conversations WHERE deleted_at IS NULL"
DELETED = "FROM conversations WHERE deleted_at <= ?"


class History:
    """The conversations of this data folder's owner, by id; what guests say is never here. A
    failure to write or read is told through `tell` and stands in `told`, once until a write
    succeeds; none stops the chat. passed: how many of those told are over. Other programs may use
    the file too: see `save`.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] | None = None) -> None:
        self.file = file
        self._tell = tell or (lambda line: print(line, file=sys.stderr))
        self.told: list[str] = []
        self.passed = 0
        self._failures: set[str] = set()  # since a write succeeded
        self._lock = threading.Lock()

    def save(
        self,
        id: str,
        kept: StoredConversation,
        is_deleted: bool = False,
        before: StoredConversation | None = None,
    ) -> StoredConversation | None:
        """Write one conversation; what is on disk now, None when it could not be kept.

        is_deleted: it is in no list, and removed by a later `purge`, as an empty one is. before:
        what was on disk when the writer looked last; what another program has made of that since
        is merged with it.
        """
        saved = kept

        def save(base: sqlite3.Connection) -> None:
            nonlocal saved
            base.execute("BEGIN IMMEDIATE")
            row = base.execute(FOUND, (id,)).fetchone()
            if row and row[0] != (before or kept).to_line():
                other = self._checked(row[:3])
                saved = kept.merged(other, before or StoredConversation()) if other else kept
            is_gone = is_deleted or not saved.tree.said
            times = (saved.created_at, saved.updated_at, time.time() if is_gone else None)
            base.execute(SAVE, (id, saved.title, *times, saved.words, saved.to_line()))

        return saved if self._write(save) else None

    def add(
        self, found: Sequence[tuple[str, StoredConversation]], taken: Container[str] = ()
    ) -> int | None:
        """Write conversations from elsewhere, all or none: how many, None where that failed. What
        is here with all its messages is left out; where another one has its id, here or in `taken`,
        it gets one that follows from what it says. Nothing that is here changes."""
        added = 0

        def add(base: sqlite3.Connection) -> None:
            nonlocal added
            added = 0
            base.execute("BEGIN IMMEDIATE")
            for id, kept in found:
                line = kept.to_line()
                while (row := base.execute(FOUND, (id,)).fetchone()) or id in taken or not id:
                    here = self._checked(row[:3]) if row and row[3] is None else None
                    if here and here.tree.contains(kept.tree):
                        break
                    id = sha256(f"{id}\n{line}".encode()).hexdigest()[:32]
                else:
                    times = (kept.created_at, kept.updated_at, None)
                    base.execute(SAVE, (id, kept.title, *times, kept.words, line))
                    added += 1

        return added if self._write(add) else None

    def load(self, id: str) -> StoredConversation | None:
        """A conversation; None when there is none that can be read."""
        rows = self._rows(f"{READ} AND id = ?", (id,))
        return self._checked(rows[0]) if rows else None

    def is_gone(self, id: str) -> bool:
        """Whether it was deleted for certain: the file can be read and does not have it."""
        return self._rows(COUNT, (id,)) == [(0,)]

    def all(self) -> list[StoredConversation]:
        """Every conversation that can be read, the latest first."""
        rows = self._rows(f"{READ} ORDER BY updated_at DESC, rowid DESC")
        return [found for row in rows if (found := self._checked(row)) is not None]

    def listed(self, search: str = "", most: int = -1) -> list[Listed]:
        """Conversations that hold all words of `search`, latest first. most: -1 for all."""
        return [Listed(*row) for row in self._rows(LIST, (search, search, most))]

    def purge(self, seconds: float) -> list[str]:
        """Remove from the disk what was deleted so many seconds ago; the ids."""
        if not self.file.exists():
            return []
        found: list[str] = []

        def purge(base: sqlite3.Connection) -> None:
            until = (time.time() - seconds,)
            found.extend(gone for (gone,) in base.execute(f"SELECT id {DELETED}", until))
            if found:
                base.execute(f"DELETE {DELETED}", until)

        self._write(purge)
        return found

    def _write(self, act: Callable[[sqlite3.Connection], object]) -> bool:
        try:
            self._run(act)
        except (OSError, sqlite3.Error, UnicodeError) as error:
            self._fail(f"the conversations cannot be saved ({error}): check {self.file}")
            return False
        if self._failures:
            self._failures.clear()
            self.passed = len(self.told)
        return True

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a query; none, with a message, if the file cannot be read."""
        if not self.file.exists():
            return []
        found: list[Any] = []
        try:
            with self._lock:
                found = self._mending(lambda: self._select(query, values))
        except (OSError, sqlite3.Error) as error:
            self._fail(f"the conversations in {self.file} cannot be read ({error})")
        return found

    def _select(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        base = opened_to_read(self.file, self._fail)
        if base is None:
            return []
        with closing(base):
            return base.execute(query, values).fetchall()

    def _run(self, act: Callable[[sqlite3.Connection], object]) -> None:
        """Act on the file and commit."""
        with self._lock:
            self._mending(lambda: self._commit(act))

    def _mending(self, act: Callable[[], T]) -> T:
        """Do something; once more where the file was broken, which it is no longer then."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            self._mend(error)
            return act()

    def _commit(self, act: Callable[[sqlite3.Connection], object]) -> None:
        with closing(self._open()) as base, base:
            act(base)

    def _checked(self, row: tuple[str, float, float]) -> StoredConversation | None:
        """Strictly what was written; None, and said, for anything else."""
        try:
            return StoredConversation.from_line(*row)
        except ValueError as error:
            self._fail(f"a conversation in {self.file} cannot be read ({error})")
            return None

    def _open(self) -> sqlite3.Connection:
        return opened(self.file)

    def _mend(self, error: sqlite3.DatabaseError) -> None:
        """Raises the error where the file is not at fault: its subclasses tell of a full disk, a
        lock, or a folder that cannot be written."""
        if type(error) is not sqlite3.DatabaseError:
            raise error
        if done := mend(self.file):
            self._say(f"{self.file} is broken ({error}): {done}")

    def _fail(self, line: str) -> None:
        if line not in self._failures:
            self._failures.add(line)
            self._say(line)

    def _say(self, line: str) -> None:
        self.told.append(line)
        self._tell(line)
