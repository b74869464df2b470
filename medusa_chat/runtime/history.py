"""History: the owner's conversations on disk (SQLite, WAL), written by one program at a time.

The program that runs the page holds a lock beside the file until it ends; the system releases the
lock even after a crash. Every other program only reads.
"""

import json
import os
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

from filelock import FileLock, Timeout

from medusa_chat import paths
from medusa_chat.runtime.stored_conversation import (
    PIN,
    Binned,
    Listed,
    StoredConversation,
    excerpt_of,
    holds,
)

T = TypeVar("T")
FILE = "chats.sqlite3"
BUSY_SECONDS = 5.0
BIN_SECONDS = 30 * 86400.0  # that a deleted conversation can be brought back
# Columns. deleted_at: when a conversation leaves the bin for good, NULL where it is not in it. That
# is later than now, so that versions without a bin neither list nor remove what lies in it.
NAMES = ("id", "title", "created_at", "updated_at", "deleted_at", "words", "body")
TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
    deleted_at REAL, words TEXT NOT NULL, body TEXT NOT NULL)
"""
INDEX = "CREATE INDEX IF NOT EXISTS newest ON conversations (updated_at)"
PRAGMAS = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA secure_delete = ON")
SAVE = """
INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE SET
    title = excluded.title, updated_at = excluded.updated_at, body = excluded.body,
    words = excluded.words, deleted_at = CASE WHEN excluded.deleted_at IS NULL THEN NULL
    ELSE coalesce(conversations.deleted_at, excluded.deleted_at) END
"""
# A pinned conversation's body begins so: a list need not read it whole to know.
PINNED = f"(substr(body, 1, {len(PIN)}) = '{PIN}')"
ORDER = f"ORDER BY {PINNED} DESC, updated_at DESC, rowid DESC"
# Excerpts are made behind the limit: beside it, the order would have all rows make theirs.
LIST = f"""
SELECT id, title, updated_at, excerpt(CAST(body AS BLOB), ?), {PINNED} FROM conversations
WHERE rowid IN (SELECT rowid FROM conversations
    WHERE deleted_at IS NULL AND holds(CAST(words AS BLOB), ?) {ORDER} LIMIT ?)
{ORDER}
"""
BIN = """
SELECT id, title, deleted_at FROM conversations WHERE deleted_at > ?
ORDER BY deleted_at DESC, rowid DESC
"""
RESTORE = "UPDATE conversations SET deleted_at = NULL WHERE id = ? AND deleted_at > ?"
READ = "SELECT body, created_at, updated_at FROM conversations WHERE deleted_at IS NULL"
PRESENT = "SELECT body, created_at, updated_at, deleted_at FROM conversations WHERE id = ?"
OUT = "SELECT id FROM conversations WHERE deleted_at <= ?"
REMOVE = "DELETE FROM conversations WHERE id = ?"
RESCUE = "INSERT OR IGNORE INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)"
ROW = "SELECT * FROM conversations WHERE rowid = ?"
LAST = (  # from the table; if that is broken, from its index
    "SELECT max(rowid) FROM conversations NOT INDEXED",
    "SELECT max(rowid) FROM conversations INDEXED BY newest",
)
MOST = 1_000_000  # rows: a broken page may claim any number
# SQLite does not check that text is UTF-8: a damaged byte should cost a character, not the list.
TEXT = partial(str, encoding="utf-8", errors="replace")
PAGE, CHANGES = 4096, 27  # bytes of a page; offset of the change counter in the first page
# Errors for a file that cannot be read because SQLite cannot write the index of its log beside it:
# the folder is read-only, or the disk is full.
NO_ROOM = {
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_PERM,
}


class History:
    """The conversations of a data folder's owner, by id; those of guests are never stored.

    Nothing is written before `own`. A failure to write or read stops no chat: it is reported once
    through `tell`, and again only after a write has succeeded. told: all reports. passed: how many
    of them are over.
    """

    def __init__(self, file: Path, tell: Callable[[str], None] | None = None) -> None:
        self.file = file
        self.told: list[str] = []
        self.passed = 0
        self.is_owned = False
        self._tell = tell or (lambda line: print(line, file=sys.stderr))
        self._failures: set[str] = set()  # since a write succeeded
        self._lock = threading.Lock()
        self._owner_lock = FileLock(f"{file}.lock", timeout=0, thread_local=False)

    def own(self) -> bool:
        """Take the conversations for this program; False if another program has them."""
        with self._lock:
            if self.is_owned:
                return True
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                self._owner_lock.acquire()
                note = json.dumps({"pid": os.getpid(), "since": time.time()})
                paths.write_text(self._owner_file, note)
            except Timeout:
                return False
            except (OSError, NotImplementedError):
                pass  # the folder cannot be written, or the disk has no locks
            self.is_owned = True
            return True

    def close(self) -> None:
        """Release the conversations for other programs."""
        with self._lock:
            self.is_owned = False
            self._owner_lock.release()

    @property
    def other_owner(self) -> str:
        """The program that owns the conversations, in words."""
        try:
            note = json.loads(self._owner_file.read_text())
            begun = time.localtime(note["since"])
            is_today = begun[:3] == time.localtime()[:3]
            since = time.strftime("%H:%M" if is_today else "%A %H:%M", begun)
            return f"another medusa-chat (process {note['pid']:d}, since {since})"
        except (OSError, ValueError, TypeError, KeyError, OverflowError):
            return "another medusa-chat"

    @property
    def _owner_file(self) -> Path:
        return self.file.with_name(f"{self.file.name}.owner")

    # ---- reading ----

    def load(self, id: str) -> StoredConversation | None:
        """A conversation; None if it does not exist or cannot be read."""
        rows = self._rows(f"{READ} AND id = ?", (id,))
        return self._parsed(rows[0]) if rows else None

    def all(self) -> list[StoredConversation]:
        """All readable conversations, latest first."""
        rows = self._rows(f"{READ} ORDER BY updated_at DESC, rowid DESC")
        return [kept for row in rows if (kept := self._parsed(row)) is not None]

    def listed(self, search: str = "", most: int = -1) -> list[Listed]:
        """Conversations that contain all words of `search`, latest first. most: -1 for all."""
        return [Listed(*row) for row in self._rows(LIST, (search, search, most))]

    def binned(self) -> list[Binned]:
        """The conversations in the bin, the latest there first."""
        return [Binned(*row) for row in self._rows(BIN, (time.time(),))]

    def _rows(self, query: str, values: tuple[Any, ...] = ()) -> list[Any]:
        """The rows of a query; none, and reported, if the file cannot be read."""
        if not self.file.exists():
            return []
        try:
            with self._lock:
                return self._repairing(lambda: self._select(query, values))
        except (OSError, sqlite3.Error) as error:
            self.fail(f"the conversations in {self.file} cannot be read ({error})")
            return []

    def _select(self, query: str, values: tuple[Any, ...]) -> list[Any]:
        base = opened_to_read(self.file, self.fail)
        if base is None:
            return []
        with closing(base):
            return base.execute(query, values).fetchall()

    def _parsed(self, row: tuple[str, float, float]) -> StoredConversation | None:
        """The conversation of a row; None, and reported, if it is invalid."""
        try:
            return StoredConversation.from_line(*row)
        except ValueError as error:
            self.fail(f"a conversation in {self.file} cannot be read ({error})")
            return None

    # ---- writing ----

    def save(self, id: str, kept: StoredConversation, is_deleted: bool = False) -> bool:
        """Write one conversation atomically -> whether it was written. is_deleted: it lies in the
        bin, for BIN_SECONDS if it is new there; a later `purge` removes it then, and conversations
        without messages at once."""
        gone_at = time.time() if not kept.tree.said else time.time() + BIN_SECONDS
        is_gone = is_deleted or not kept.tree.said
        times = (kept.created_at, kept.updated_at, gone_at if is_gone else None)
        row = (id, kept.title, *times, kept.words, kept.to_line())
        return self._write(lambda base: base.execute(SAVE, row))

    def add(
        self, imported: Sequence[tuple[str, StoredConversation]], taken: Container[str] = ()
    ) -> int | None:
        """Write imported conversations, all or none -> how many were added, None if that failed.
        One that is already here with all its messages is left out; one whose id belongs to another
        conversation, here or in `taken`, gets an id derived from its content. Existing
        conversations do not change."""
        added = 0

        def add(base: sqlite3.Connection) -> None:
            nonlocal added
            added = 0
            for id, kept in imported:
                line = kept.to_line()
                while (row := base.execute(PRESENT, (id,)).fetchone()) or id in taken or not id:
                    present = self._parsed(row[:3]) if row and row[3] is None else None
                    if present and present.tree.contains(kept.tree):
                        break
                    id = sha256(f"{id}\n{line}".encode()).hexdigest()[:32]
                else:
                    times = (kept.created_at, kept.updated_at, None)
                    base.execute(SAVE, (id, kept.title, *times, kept.words, line))
                    added += 1

        return added if self._write(add) else None

    def restore(self, id: str) -> bool:
        """Bring a conversation back from the bin -> whether it was there."""
        done = 0

        def restore(base: sqlite3.Connection) -> None:
            nonlocal done
            done = base.execute(RESTORE, (id, time.time())).rowcount

        return self._write(restore) and done > 0

    def purge(self, seconds: float, kept: Container[str] = ()) -> list[str]:
        """Remove from the disk what has been out of the bin for so many seconds -> the ids, none
        where that failed; -inf: also what is still in it. kept: ids that stay."""
        if not self.file.exists():
            return []
        gone: list[str] = []

        def purge(base: sqlite3.Connection) -> None:
            rows = base.execute(OUT, (time.time() - seconds,))
            gone[:] = [id for (id,) in rows if id not in kept]
            base.executemany(REMOVE, [(id,) for id in gone])

        return gone if self._write(purge) else []

    def _write(self, act: Callable[[sqlite3.Connection], object]) -> bool:
        """Act on the file and commit -> whether that succeeded."""
        if not self.is_owned:
            return False
        try:
            with self._lock:
                self._repairing(lambda: self._commit(act))
        except (OSError, sqlite3.Error, UnicodeError) as error:
            self.fail(f"the conversations cannot be saved ({error}): check {self.file}")
            return False
        if self._failures:
            self.recover()
        return True

    def _commit(self, act: Callable[[sqlite3.Connection], object]) -> None:
        with closing(self._open()) as base, base:
            act(base)

    def _open(self) -> sqlite3.Connection:
        return opened(self.file)

    # ---- failures ----

    def _repairing(self, act: Callable[[], T]) -> T:
        """Call `act`; if the file is broken, repair it and call `act` again. Raises sqlite3.Error,
        also for a broken file that another program owns."""
        try:
            return act()
        except sqlite3.DatabaseError as error:
            # Subclasses mean a full disk, a lock, or a folder that cannot be written.
            if type(error) is not sqlite3.DatabaseError or not self.is_owned:
                raise
            self._say(f"{self.file} is broken ({error}): {repair(self.file)}")
            return act()

    def fail(self, line: str) -> None:
        """Report a failure to the owner, in the terminal and in every tab; only once until a write
        succeeds."""
        if line not in self._failures:
            self._failures.add(line)
            self._say(line)

    def recover(self) -> None:
        """Note that the failures so far are over."""
        self._failures.clear()
        self.passed = len(self.told)

    def _say(self, line: str) -> None:
        self.told.append(line)
        self._tell(line)


def opened(file: Path) -> sqlite3.Connection:
    """A connection for writing; creates a missing file. Raises OSError and sqlite3.Error;
    DatabaseError itself, not a subclass, for a broken file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    base = _connected(str(file))
    try:
        _prepare(base, (*PRAGMAS, TABLE, INDEX))
    except BaseException:
        base.close()
        raise
    return base


def opened_to_read(file: Path, tell: Callable[[str], None]) -> sqlite3.Connection | None:
    """A connection to an existing file that writes nothing; None for an empty file. tell: called
    with a line if the latest writes cannot be read. Raises as `opened` does."""
    path = quote(os.fsencode(file.absolute().as_posix()))
    address = f"file:///{path.removeprefix('/')}?mode=ro"  # a drive stands behind a slash as well
    try:
        return _reading(address)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in NO_ROOM:
            raise
    log = Path(f"{file}-wal")
    if log.exists() and log.stat().st_size:
        tell(
            f"the latest messages are missing: they are in {log}, which can be read only if the "
            "folder is writable"
        )
    return _reading(f"{address}&immutable=1")


def _reading(address: str) -> sqlite3.Connection | None:
    base, is_used = _connected(address), False
    try:
        is_used = _prepare(base)
    finally:
        if not is_used:
            base.close()
    return base if is_used else None


def _connected(address: str) -> sqlite3.Connection:
    base = sqlite3.connect(address, timeout=BUSY_SECONDS, uri=address.startswith("file:"))
    base.text_factory = TEXT
    return base


def _prepare(base: sqlite3.Connection, lines: Sequence[str] = ()) -> bool:
    """Execute the lines and define the functions used in queries -> whether the file has a schema.
    Raises DatabaseError itself, not a subclass, for a damaged schema."""
    base.create_function("holds", 2, lambda words, search: holds(TEXT(words), search))
    base.create_function("excerpt", 2, lambda body, search: excerpt_of(TEXT(body), search))
    try:
        for line in lines:
            base.execute(line)
        names = tuple(name for _, name, *_ in base.execute("PRAGMA table_info(conversations)"))
        (entries,) = base.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except UnicodeDecodeError:  # from an error message that quotes the damaged byte
        raise sqlite3.DatabaseError("its schema is damaged") from None
    if entries and not set(NAMES) <= set(names):
        raise sqlite3.DatabaseError(f"its columns are {', '.join(names)[:100] or 'gone'}")
    return bool(entries)


def repair(file: Path) -> str:
    """Replace a broken file with a new one that has all readable rows, and keep the broken one
    under another name -> what was done, in words. Raises OSError and sqlite3.Error."""
    now = time.time_ns()
    aside, new, copy = (
        file.with_name(f"{file.name}.{kind}-{now}") for kind in ("corrupt", "new", "copy")
    )
    try:
        for suffix in ("", "-wal"):
            with suppress(FileNotFoundError):
                shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
        opened(new).close()
        _replace_first_page(copy, new)
        with closing(opened(new)) as base, base:
            kept = base.executemany(RESCUE, _readable(copy)).rowcount
        paths.write_bytes(aside, file.read_bytes())  # a copy: the file is never missing
        log = Path(f"{file}-wal")  # if it stayed, it would be read into the new file
        if log.exists() and log.stat().st_size:
            paths.replace(log, Path(f"{aside}-wal"))
        for suffix in ("-wal", "-shm"):
            Path(f"{file}{suffix}").unlink(missing_ok=True)
        paths.replace(new, file)
    finally:
        new.unlink(missing_ok=True)
        for suffix in ("", "-wal", "-shm"):
            Path(f"{copy}{suffix}").unlink(missing_ok=True)
    return f"it was set aside as {aside.name}; {kept} conversations could be read and are kept"


def _replace_first_page(copy: Path, new: Path) -> None:
    """Give the copy the first page of a new file, header and schema. It is the same in all our
    files except for the number of pages, which SQLite ignores if the change counter differs."""
    page = bytearray(new.read_bytes()[:PAGE])
    page[CHANGES] ^= 1
    with copy.open("r+b") as stream:
        stream.write(page)


def _readable(copy: Path) -> Iterator[tuple[Any, ...]]:
    """The readable rows with a valid conversation, each fetched separately: a broken page costs
    only the rows on it."""
    with closing(_connected(str(copy))) as base:
        with suppress(sqlite3.Error):  # not a database: no row can be read
            base.execute("PRAGMA writable_schema = ON")  # reads a file whose end is missing
        for number in range(1, _last(base) + 1):
            try:
                row = base.execute(ROW, (number,)).fetchone()
                if row is not None:
                    StoredConversation.from_line(row[-1])
                    yield row
            except (sqlite3.Error, ValueError):
                continue


def _last(base: sqlite3.Connection) -> int:
    for query in LAST:
        try:
            return min(base.execute(query).fetchone()[0] or 0, MOST)
        except (sqlite3.Error, UnicodeDecodeError):
            continue
    return 0
