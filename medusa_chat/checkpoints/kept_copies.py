"""Kept copies: quantised backbones, and what was converted from pickles.

Those of kind OLD were converted from GGUF files by earlier versions: nothing reads them any more,
they are only there to be deleted. Settings of GGUF files lie here, too, but are too small to list.

So what takes long is done once. A folder each, written whole or not at all and named by all that
its content depends on.
"""

import hashlib
import json
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from medusa_chat import __version__, paths
from medusa_chat.errors import ModelError
from medusa_chat.hub import is_repo_id

ABOUT = "about.json"
OLD, SETTINGS = "gguf", "settings"
KINDS = ("quantised", OLD, "converted")
EVERY = (*KINDS, SETTINGS)
PART = ".part-"
MARGIN = 64 << 20  # bytes of the disk that stay free


@dataclass(frozen=True)
class Origin:
    """What a copy is of. name: the checkpoint it was made for; source: its folder or file."""

    name: str
    source: str
    precision: str


@dataclass(frozen=True)
class KeptCopy:
    """A copy on this disk. kind: one of KINDS."""

    kind: str
    name: str
    source: str
    precision: str
    bytes: int
    folder: Path


def root(kind: str) -> Path:
    return paths.cache_dir() / kind


def place(kind: str, facts: Sequence[Any], files: Sequence[Path]) -> Path:
    """The folder of a copy; it need not exist. Named by facts and its source's files."""
    return root(kind) / digest(facts, files)


def digest(facts: Sequence[Any], files: Sequence[Path]) -> str:
    """A name for facts and the place, the size and the time of change of files, of which none is
    opened. Raises OSError."""
    told = list(facts)
    for file in files:
        stat = file.stat()
        told.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:40]


def is_kept(folder: Path) -> bool:
    return (folder / ABOUT).is_file()


def has_room(folder: Path, size: int) -> bool:
    """Whether the disk has room for a copy of `size` bytes, once nothing is left there of processes
    that were killed while they wrote one. Makes the folder above it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    for left in (one for kind in EVERY for one in root(kind).glob(f"{PART}*")):
        with suppress(OSError, Timeout), _held(left, seconds=0):
            pass
    return shutil.disk_usage(folder.parent).free >= size + MARGIN


@contextmanager
def writing(folder: Path, origin: Origin) -> Iterator[Path]:
    """Yields a new folder to be filled, which then becomes the copy `folder`, instead of those that
    were made of the same source before. After an error no half copy stays."""
    partial = folder.with_name(f"{PART}{uuid.uuid4().hex}")
    with _held(partial):
        partial.mkdir()
        yield partial
        paths.write_text(partial / ABOUT, json.dumps(asdict(origin) | {"version": __version__}))
        for old in _all(folder.parent.name):
            if (old.source, old.precision) == (origin.source, origin.precision):
                drop(old.folder)
        if not folder.is_dir():  # another process may have made it meanwhile
            paths.replace(partial, folder)


@contextmanager
def _held(partial: Path, seconds: float = -1) -> Iterator[None]:
    """Hold the lock of a copy that is being written, of which whoever is killed lets go; in the end
    nothing is left of both. Raises Timeout where another process has it for so long."""
    lock = partial.with_name(f".lock{partial.name}")
    with FileLock(lock, timeout=seconds):
        try:
            yield
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            with suppress(OSError):  # open as it is, Windows keeps it
                lock.unlink()


def kept() -> tuple[KeptCopy, ...]:
    """Every copy that is on this disk, but for settings."""
    return tuple(one for kind in KINDS for one in _all(kind))


def drop_strays(kind: str) -> None:
    """Remove the copies of a kind whose sources are gone."""
    for one in list(_all(kind)):
        if not Path(one.source).exists():
            drop(one.folder)


def drop(folder: Path) -> None:
    """Remove a copy that cannot be read."""
    shutil.rmtree(folder, ignore_errors=True)


def remove(name: str) -> int:
    """Delete all that was made for a checkpoint, a file or a repo; the bytes freed. Raises
    ModelError for one that Windows does not give up, for a process reads it; it is still listed."""
    chosen = [one for kind in EVERY for one in _all(kind) if belongs(one, name)]
    for one in chosen:
        try:
            for file in sorted(one.folder.iterdir(), key=_order):
                file.unlink(missing_ok=True)
        except FileNotFoundError:
            pass  # another process deletes it, too
        except OSError as error:
            raise ModelError(
                f"{error.filename or one.folder} cannot be deleted ({error.strerror}): "
                "end what uses it, then delete it again"
            ) from error
        drop(one.folder)
    return sum(one.bytes for one in chosen)


def _order(file: Path) -> tuple[bool, int]:
    """Weights first, and last what says that it is a copy."""
    return file.name == ABOUT, -file.stat().st_size


def belongs(one: KeptCopy, name: str) -> bool:
    """Whether a copy was made of what is called `name`: as it was given, a path that leads there,
    or the repo that the file is of."""
    try:
        path = str(Path(name).expanduser().resolve())
    except (OSError, ValueError, RuntimeError):
        path = name
    known = (one.name, one.source)
    is_repo = "/" in name and is_repo_id(name)
    return name in known or path in known or (is_repo and one.name.startswith(f"{name}/"))


def _all(kind: str) -> Iterator[KeptCopy]:
    try:
        folders = sorted(f for f in root(kind).iterdir() if not f.name.startswith("."))
    except OSError:
        return
    for folder in folders:
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            sizes = [file.stat().st_size for file in folder.iterdir()]
            name, source, precision = (str(about[key]) for key in ("name", "source", "precision"))
        except (OSError, ValueError, KeyError, TypeError):
            continue  # one that is being written
        yield KeptCopy(kind, name, source, precision, sum(sizes), folder)
