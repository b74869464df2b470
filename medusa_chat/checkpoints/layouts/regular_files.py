"""Opens a checkpoint's files: regular ones only, and without waiting for a drive that is gone."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from medusa_chat.errors import ModelError

SECONDS = 30.0  # for a folder's list or a small piece of a file: a disk may have to spin up first
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # a pipe opens, to be refused
KERNELS = ("/proc", "/sys")
T = TypeVar("T")


def read_piece(path: Path, start: int, length: int) -> bytes:
    """`length` bytes from byte `start` of a regular file; fewer where it ends. Raises ModelError,
    also where nothing comes within SECONDS."""

    def read() -> bytes:
        with open(os.open(path, os.O_RDONLY | NO_WAIT), "rb") as stream:
            if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
                raise ModelError(_irregular(path))
            stream.seek(start)
            data = stream.read(length)
            if data is None:  # it would have to be waited for
                raise ModelError(_irregular(path))
            return data

    return in_time(read, path)


def size_of(path: Path) -> int:
    """Bytes of a regular file, -1 of a link to nothing. Raises ModelError for a pipe, a device, a
    socket or a file of the kernel's, which another library would wait for or read for ever."""
    try:
        found = path.stat()
    except OSError:
        return -1
    if not stat.S_ISREG(found.st_mode) or _is_kernels(found):
        raise ModelError(_irregular(path))
    return found.st_size


def _is_kernels(facts: os.stat_result) -> bool:
    """Whether it lies where the kernel makes files up: regular by their mode, and without end, or
    waited for until there is news (/proc/kmsg)."""
    return any(os.path.ismount(one) and os.stat(one).st_dev == facts.st_dev for one in KERNELS)


def _irregular(path: Path) -> str:
    return f"{path} is not a readable file (a pipe or a device): fetch the checkpoint again"


def in_time(act: Callable[[], T], path: Path) -> T:
    """The value of act(), which uses `path`. Raises ModelError where it fails, or takes more than
    SECONDS, as on a network drive that is gone."""
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
        raise ModelError(f"{path} does not answer: is its drive still connected?")
    return values[0]
