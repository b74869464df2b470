"""Source: reads small pieces of a checkpoint's files; regular files only, with a time limit.

Weights are never read through it.
"""

import io
import json
import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import parts_of

MAX_JSON = 16_000_000  # the index of a model of a hundred shards has 1 MB


class Source(Protocol):
    """A folder of files: on this disk, or a Hub repo read by ranges.

    name: used in messages. Every method raises ModelError, in one line with the remedy.
    """

    name: str

    def files(self) -> Mapping[str, int]:
        """File name -> bytes; names of files in folders below have "/" between the parts."""
        ...

    def read(self, file: str, start: int, length: int) -> bytes:
        """`length` bytes from byte `start`; fewer where the file ends."""
        ...


class LocalFolder:
    """A folder on this disk with its readable subfolders (one level down; two where a subfolder
    has only folders), or a single GGUF file in it with its parts (`only`). The files are listed
    once."""

    def __init__(self, folder: Path, name: str | None = None, only: str | None = None) -> None:
        self.folder = folder
        self.name = name or str(folder)
        self._only = only
        self._files: dict[str, int] | None = None

    def files(self) -> dict[str, int]:
        """Raises ModelError for a folder that cannot be read, and for one with a pipe in it."""
        if self._files is None:
            self._files = in_time(self._listed, self.folder)
        return self._files

    def _listed(self) -> dict[str, int]:
        if self._only is not None:
            places = {name: self.folder / name for name in parts_of(self._only)}
            return {name: size_of(path) for name, path in places.items() if os.path.lexists(path)}
        paths, folders = _entries(self.folder)
        whole = self.folder.resolve()
        for folder in folders if whole != whole.parent else ():  # / holds the whole system
            files, deeper = _entries(folder)
            paths += files or [file for one in deeper for file in _entries(one)[0]]
        return {path.relative_to(self.folder).as_posix(): size_of(path) for path in sorted(paths)}

    def read(self, file: str, start: int, length: int) -> bytes:
        """Raises ModelError for a file that cannot be read."""
        return read_piece(self.folder / file, start, length)

    def stamp(self, file: str) -> tuple[int, ...]:
        """What differs once a file has other contents; empty where reading it will say why not."""
        try:
            stat = (self.folder / file).stat()
        except OSError:
            return ()
        return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


def _entries(folder: Path) -> tuple[list[Path], list[Path]]:
    """(its files, its readable folders), without hidden ones and lost+found."""
    entries = [entry for entry in os.scandir(folder) if not entry.name.startswith(".")]
    folders = [entry for entry in entries if _is_folder(entry)]
    readable = [Path(one.path) for one in folders if os.access(one.path, os.R_OK | os.X_OK)]
    return [Path(one.path) for one in entries if not _is_folder(one)], readable


def _is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a folder or a link to one; False for circular links."""
    try:
        return entry.is_dir()
    except OSError:
        return False


class Stream(io.RawIOBase):
    """A file of a source as a seekable stream, for zipfile."""

    def __init__(self, source: Source, file: str, size: int) -> None:
        super().__init__()
        self._source, self._file, self._size, self._place = source, file, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError("seek before the start")
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._place))
        data = self._source.read(self._file, self._place, length) if length else b""
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


def read_json(source: Source, file: str, most: int = MAX_JSON) -> dict[str, Any]:
    """A JSON object. Raises ModelError for anything else, and for more than `most` bytes."""
    size = source.files().get(file, 0)
    if size > most:
        raise ModelError(
            f"{file} of {source.name} has {size} bytes, which is too large for a configuration: "
            "download it again"
        )
    try:
        value = json.loads(source.read(file, 0, most))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file} of {source.name} is not valid JSON: download it again") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file} of {source.name} is not a JSON object: download it again")
    return value


SECONDS = 30.0  # for listing a folder or reading a piece: a disk may have to spin up first
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # so that a pipe can be refused
KERNELS = ("/proc", "/sys")
T = TypeVar("T")


def read_piece(path: Path, start: int, length: int) -> bytes:
    """`length` bytes from byte `start` of a regular file; fewer at its end. Raises ModelError, also
    after SECONDS without an answer."""

    def read() -> bytes:
        with open(os.open(path, os.O_RDONLY | NO_WAIT), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ModelError(_irregular(path))
            stream.seek(start)
            data = stream.read(length)
            if data is None:  # it would block
                raise ModelError(_irregular(path))
            return data

    return in_time(read, path)


def size_of(path: Path) -> int:
    """Bytes of a regular file, -1 for a broken link. Raises ModelError for a pipe, a device, a
    socket, or a file in /proc or /sys, which another library would read forever or block on."""
    try:
        status = path.stat()
    except OSError:
        return -1
    if not stat.S_ISREG(status.st_mode) or _is_kernels(status):
        raise ModelError(_irregular(path))
    return status.st_size


def _is_kernels(facts: os.stat_result) -> bool:
    """Whether it is in /proc or /sys: files there may be endless or block (/proc/kmsg)."""
    return any(os.path.ismount(one) and os.stat(one).st_dev == facts.st_dev for one in KERNELS)


def _irregular(path: Path) -> str:
    return f"{path} is not a readable file (a pipe or a device): download the checkpoint again"


def in_time(act: Callable[[], T], path: Path) -> T:
    """The value of act(), which uses `path`. Raises ModelError if it fails or takes more than
    SECONDS, as on a disconnected network drive."""
    values: list[T] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            values.append(act())
        except Exception as error:  # raised again, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True, name=f"read {path}")
    thread.start()
    thread.join(SECONDS)
    for error in errors:
        if isinstance(error, OSError):
            raise ModelError(f"{path} cannot be read ({error.strerror or error})") from error
        raise error
    if not values:
        raise ModelError(f"{path} does not respond: is its drive still connected?")
    return values[0]
