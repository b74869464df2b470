"""A file of the cache: whole or partial, its hash, its lock, and what the disk refuses."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from medusa_chat.hub.cache import cache_folder
from medusa_chat.hub.errors import HubError
from medusa_chat.hub.repo import RepoFile
from medusa_chat.hub.transfer_state import TransferState
from medusa_chat.units import gb

CHUNK = 1 << 20
DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


def is_intact(place: Path, file: RepoFile, state: TransferState, check: bool) -> bool:
    """Whether a cached file has the right size and, if `check`, the right hash."""
    try:
        if not place.is_file() or place.stat().st_size != file.size:
            return False
        if not check:
            return True
        state.phase = "check"
        with open(place, "rb") as stream:
            hasher = hasher_for(file)
            _hash_rest(stream, hasher, state)
        return str(hasher.hexdigest()) == file.blob
    except OSError:
        return False


def discard(place: Path, file: RepoFile, state: TransferState) -> None:
    """Remove a cached file that is not what it should be."""
    if place.is_file():
        state.note = f"{file.name} in the cache was damaged: downloaded again"
        state.total += file.size if place.stat().st_size == file.size else 0
    place.unlink(missing_ok=True)


@contextmanager
def locked(blob: Path, file: RepoFile) -> Iterator[None]:
    """Hold the lock that huggingface_hub takes too. blob: where the file will be. Raises HubError
    when another has it."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    folder = cache_folder() / ".locks" / blob.parent.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(folder / f"{file.blob}.lock", timeout=1))
        except Timeout as error:
            raise HubError(
                f"{file.name} is already being downloaded: wait until it is done",
                "busy",
            ) from error
        yield


class PartialFile:
    """A file that is not whole yet, and the hash of what it holds. Only appended to."""

    def __init__(self, stream: BinaryIO, file: RepoFile) -> None:
        self.stream, self.file = stream, file
        self.hasher = hasher_for(file)
        self.size = 0

    def resume(self, state: TransferState) -> None:
        """Hash what is there from before, to go on at its end."""
        size = self.stream.seek(0, os.SEEK_END)
        if size > self.file.size:
            return self.clear()
        if size:
            state.phase, state.note = "check", f"{self.file.name}: resuming at {gb(size)}"
        self.stream.seek(0)
        self.size = _hash_rest(self.stream, self.hasher, state)

    def append(self, chunk: bytes) -> None:
        """Raises HubError when there is more than the file has, OSError when the disk is full."""
        if self.size + len(chunk) > self.file.size:
            self.clear()
            raise HubError(
                f"the Hub sends more data for {self.file.name} than its size: check HF_ENDPOINT",
                "damaged",
            )
        self.stream.write(chunk)
        self.hasher.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self.stream.seek(0)
        self.stream.truncate(0)
        self.hasher, self.size = hasher_for(self.file), 0


def hasher_for(file: RepoFile) -> Any:
    """SHA-256 of the content for a large file, git's SHA-1 for a small one."""
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


def _hash_rest(stream: BinaryIO, hasher: Any, state: TransferState) -> int:
    """Hash a stream to its end; how many bytes that were. Raises Cancelled."""
    size = 0
    while chunk := stream.read(CHUNK):
        state.check()
        hasher.update(chunk)
        size += len(chunk)
    return size


@contextmanager
def disk_errors(folder: Path, file: RepoFile | None = None) -> Iterator[None]:
    """Turn a disk that is full or closed into one line; what has arrived of `file` is kept."""
    try:
        yield
    except OSError as error:
        if file and error.errno in DISK_FULL:
            raise HubError(
                f"the disk of {cache_folder()} is full in the middle of {file.name}: free "
                f"{gb(file.size)} (medusa-chat models rm), then pull again: what has arrived is "
                "kept",
                "disk",
            ) from error
        raise HubError(
            f"{folder} cannot be written ({error.strerror or error}): check its owner, or set "
            "HF_HOME to a folder of yours",
            "disk",
        ) from error
