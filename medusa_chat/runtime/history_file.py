"""The file of the conversations: opened, and mended row by row where it is broken."""

import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import FileLock

from medusa_chat import paths
from medusa_chat.runtime.stored_conversation import StoredConversation, excerpt_of, holds

BUSY_SECONDS = 5.0
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
KEEP = "INSERT OR IGNORE INTO conversations VALUES (?, ?, ?, ?, ?, ?, ?)"


def opened(file: Path) -> sqlite3.Connection:
    """A connection; the file is made where there is none. Raises OSError and sqlite3.Error."""
    file.parent.mkdir(parents=True, exist_ok=True)
    base = _connected(file)
    try:
        base.create_function("holds", 2, lambda words, search: holds(TEXT(words), search))
        base.create_function("excerpt", 2, lambda body, search: excerpt_of(TEXT(body), search))
        for line in (*PRAGMAS, TABLE, INDEX):
            base.execute(line)
    except BaseException:
        base.close()
        raise
    return base


def mend(file: Path) -> str:
    """Set a broken file aside, never deleted, with a new one in its place that has all rows which
    can be read; what was done, in words, empty where it is not broken (another program has mended
    it). Raises OSError and sqlite3.Error."""
    now = time.time_ns()
    aside, new = (file.with_name(f"{file.name}.{kind}-{now}") for kind in ("corrupt", "new"))
    with FileLock(f"{file}.lock"):
        if _is_sound(file):
            return ""
        try:
            with closing(opened(new)) as base, base:
                kept = base.executemany(KEEP, _rows_of(file)).rowcount
            paths.write_bytes(aside, file.read_bytes())  # the file is never missing
            for suffix in ("-wal", "-shm"):  # a log that stayed would be read into the new file
                with suppress(FileNotFoundError):
                    paths.replace(Path(f"{file}{suffix}"), Path(f"{aside}{suffix}"))
            paths.replace(new, file)
        finally:
            new.unlink(missing_ok=True)
    return f"it was set aside as {aside.name}; {kept} conversations could be read and are kept"


def _connected(file: Path) -> sqlite3.Connection:
    base = sqlite3.connect(file, timeout=BUSY_SECONDS)
    base.text_factory = TEXT
    return base


def _is_sound(file: Path) -> bool:
    try:
        with closing(_connected(file)) as base:
            return bool(base.execute("PRAGMA integrity_check").fetchone() == ("ok",))
    except sqlite3.Error:
        return False


def _rows_of(file: Path) -> Iterator[tuple[Any, ...]]:
    """The rows of a broken file that hold a conversation; none where it is no database any more."""
    with closing(_connected(file)) as base:
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
        except sqlite3.Error:
            continue
    return 0
