"""History: the owner's conversations on disk (SQLite, WAL), a row each."""

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

from filelock import FileLock

from medusa_chat import paths
from medusa_chat.runtime.stored_conversation import Listed, StoredConversation, excerpt_of, holds

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


BUSY_SECONDS = 5.0
NAMES = ("id", "title", "created_at", "updated_at", "deleted_at", "words", "body")  # of columns
TABLE = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, title TEXT NOT NULL, created_at REAL NOT NULL, updated_at REAL NOT NULL,
    deleted_at REAL, words TEXT NOT NULL, body TEXT NOT NULL)
"""
PRAGMAS = ("PRAGMA journal_mode = WAL", "PRAGMA synchronous = FULL", "PRAGMA secure_delete = ON")
INDEX = "CREATE INDEX IF NOT EXISTS newest ON conversations (updated_at)"
LAST = (  # by the table, and where that is broken by its other tree
    "SELECT max(rowid) FROM conversations NOT INDEXED",
    "SELECT max(rowid) FROM conversations INDEXED BY newest",
)
ROW = "SELECT * FROM conversations WHERE rowid = ?"
MOST = 1_000_000  # conversations that were ever begun: a broken page can tell of any number
# sqlite never looks whether a text is UTF-8: a damaged byte costs a character, and no list
TEXT = partial(str, encoding="utf-8", errors="replace")
PAGE, CHANGES = 4096, 27  # bytes of a page, and the place of the count of changes in the first one
KEEP = "INSERT OR IGNORE INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)"
# What a file says that cannot be read without writing beside it: a folder or a disk that takes
# nothing, where sqlite would make the index of its log.
NO_ROOM = (
    *(sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_IOERR),
    *(sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM),
)


def opened(file: Path) -> sqlite3.Connection:
    """A connection to write; the file is made where there is none. Raises OSError and
    sqlite3.Error, an exact DatabaseError where the file is broken."""
    file.parent.mkdir(parents=True, exist_ok=True)
    base = _connected(str(file))
    try:
        _prepare(base, (*PRAGMAS, TABLE, INDEX))
    except BaseException:
        base.close()
        raise
    return base


def opened_to_read(file: Path, tell: Callable[[str], None]) -> sqlite3.Connection | None:
    """A connection to a file that is there, which needs to write nothing; None for one in which
    nothing was ever written. tell: gets a line where what was written last cannot be read. Raises
    sqlite3.Error as `opened` does."""
    address = f"file://{_in_address(file)}?mode=ro"
    try:
        return _reading(address)
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode & 0xFF not in NO_ROOM:
            raise
    log = Path(f"{file}-wal")
    if log.exists() and log.stat().st_size:
        tell(
            f"the conversations are shown without what was said last, which stands in {log} and "
            "can be read only where the disk takes something"
        )
    return _reading(f"{address}&immutable=1")


def mend(file: Path) -> str:
    """Set a broken file aside, never deleted, with a new one in its place that has all rows which
    can be read; what was done, in words, empty where it is not broken (another program has mended
    it). Raises OSError and sqlite3.Error."""
    now = time.time_ns()
    aside, new, copy = (
        file.with_name(f"{file.name}.{kind}-{now}") for kind in ("corrupt", "new", "copy")
    )
    with FileLock(f"{file}.lock"):
        if _is_sound(file):
            return ""
        try:
            for suffix in ("", "-wal"):
                with suppress(FileNotFoundError):
                    shutil.copyfile(f"{file}{suffix}", f"{copy}{suffix}")
            opened(new).close()
            with closing(opened(new)) as base, base:
                kept = base.executemany(KEEP, _rows_of(copy, _first_page(new))).rowcount
            paths.write_bytes(aside, file.read_bytes())  # the file is never missing
            for suffix in ("-wal", "-shm"):  # a log that stayed would be read into the new file
                with suppress(FileNotFoundError):
                    paths.replace(Path(f"{file}{suffix}"), Path(f"{aside}{suffix}"))
            paths.replace(new, file)
        finally:
            new.unlink(missing_ok=True)
            for suffix in ("", "-wal", "-shm"):
                Path(f"{copy}{suffix}").unlink(missing_ok=True)
    return f"it was set aside as {aside.name}; {kept} conversations could be read and are kept"


def _in_address(file: Path) -> str:
    """The path as sqlite reads it: a drive, and a server's name, stand behind a slash as well."""
    path = quote(os.fsencode(file.absolute().as_posix()))
    return path if path.startswith("/") else f"/{path}"


def _connected(address: str) -> sqlite3.Connection:
    base = sqlite3.connect(address, timeout=BUSY_SECONDS, uri=address.startswith("file:"))
    base.text_factory = TEXT
    return base


def _prepare(base: sqlite3.Connection, lines: Sequence[str] = ()) -> bool:
    """Execute the lines, and make what queries need; whether anything was ever written in the file.
    Raises an exact DatabaseError where the schema is damaged, also where sqlite has another error
    for that."""
    base.create_function("holds", 2, lambda words, search: holds(TEXT(words), search))
    base.create_function("excerpt", 2, lambda body, search: excerpt_of(TEXT(body), search))
    try:
        for line in lines:
            base.execute(line)
        names = tuple(name for _, name, *_ in base.execute("PRAGMA table_info(conversations)"))
        (entries,) = base.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except UnicodeDecodeError:  # of a message that quotes the damaged byte
        raise sqlite3.DatabaseError("its schema is damaged") from None
    if entries and not set(NAMES) <= set(names):
        raise sqlite3.DatabaseError(f"its columns are {', '.join(names)[:100] or 'gone'}")
    return bool(entries)


def _reading(address: str) -> sqlite3.Connection | None:
    base, is_used = _connected(address), False
    try:
        is_used = _prepare(base)
    finally:
        if not is_used:
            base.close()
    return base if is_used else None


def _is_sound(file: Path) -> bool:
    try:
        with closing(_connected(str(file))) as base:
            _prepare(base)
            return bool(base.execute("PRAGMA integrity_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def _rows_of(copy: Path, first_page: bytes) -> Iterator[tuple[Any, ...]]:
    """The rows of a copy of a broken file that hold a conversation. first_page: of a new file, with
    its header and its schema; the copy gets it where none can be read by its own."""
    is_any = False
    for row in _readable(copy):
        is_any = True
        yield row
    if not is_any:
        with copy.open("r+b") as stream:
            stream.write(first_page)
        yield from _readable(copy)


def _readable(copy: Path) -> Iterator[tuple[Any, ...]]:
    with closing(_connected(str(copy))) as base:
        with suppress(sqlite3.Error):  # no database: nothing can be read either
            base.execute("PRAGMA writable_schema = ON")  # reads a file whose end is missing
        for number in range(1, _last(base) + 1):
            try:
                row = base.execute(ROW, (number,)).fetchone()
                if row is not None:
                    StoredConversation.from_line(row[-1])
                    yield row
            except (sqlite3.Error, ValueError):
                continue


def _first_page(new: Path) -> bytes:
    """The first page of a new file, which tells of no number of pages: the copy has its own."""
    page = bytearray(new.read_bytes()[:PAGE])
    page[CHANGES] ^= 1  # the number counts only with the count of changes that stands beside it
    return bytes(page)


def _last(base: sqlite3.Connection) -> int:
    for query in LAST:
        try:
            return min(base.execute(query).fetchone()[0] or 0, MOST)
        except (sqlite3.Error, UnicodeDecodeError):
            continue
    return 0
