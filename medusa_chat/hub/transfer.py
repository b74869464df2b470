"""One file from the Hub to the cache: resumed where it broke off, and checked before it counts.

huggingface_hub's own plain download keeps nothing of a download that broke off, checks no hash and
notices a cancellation every 10 MB; so the bytes are fetched here, by its client and its headers,
into its folders. A file is `<hash>.incomplete` until its size and hash are what the Hub says.
"""

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import quote

from medusa_chat.hub.cache import cache_folder, folder_of, storage
from medusa_chat.hub.client import HubError, constants, explaining, failure, headers
from medusa_chat.hub.download_plan import RepoPlan
from medusa_chat.hub.repo import RepoFile
from medusa_chat.units import gb

CONNECT_SECONDS = 5.0
CHUNK = 1 << 20
TRIES = 4  # in a row, without a byte in between
LONGEST_WAIT = 30.0  # what a busy Hub may ask for; longer, and the user decides
DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Cancelled(Exception):
    """The user wants no more."""


@dataclass
class State:
    """What the downloading thread tells: written by it, read by others."""

    total: int  # bytes to fetch
    done: int = 0
    phase: str = "connect"
    file: str = ""
    note: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    response: Any = None

    def check(self) -> None:
        if self.stop.is_set():
            raise Cancelled

    def abort(self) -> None:
        """Ask the thread to end, and wake it from a read that waits for the server."""
        self.stop.set()
        response = self.response
        if response is None:
            return
        try:
            stream = response.extensions["network_stream"]
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except (OSError, KeyError, AttributeError, ValueError):
            pass  # already closed; else its timeout ends the thread


def provide(part: RepoPlan, file: RepoFile, state: State, check: bool) -> None:
    """Make sure that the cache holds `file`, whole. check: read what is cached and compare hashes.

    Raises HubError, Cancelled.
    """
    state.file, state.note = file.name, ""
    blobs = storage(part.id) / "blobs"
    blob, begun = blobs / file.blob, blobs / f"{file.blob}.incomplete"
    with _writing(file, blobs):
        if is_good(_place(part, file), file, state, check):
            return
        _drop(part, file, state)
        blobs.mkdir(parents=True, exist_ok=True)
        with _lock(part, file):
            if is_good(blob, file, state, check=False):  # another process was faster
                return
            if not _fetch(part, file, begun, state):  # once more, from the start
                state.note = f"{file.name} arrived damaged: once more"
                if not _fetch(part, file, begun, state):
                    raise failure(
                        "damaged",
                        f"{file.name} of {part.id} arrives damaged (its hash is not what the Hub "
                        "says): try again later, or on another network",
                    )
            os.replace(begun, blob)


def is_good(place: Path, file: RepoFile, state: State, check: bool) -> bool:
    """Whether a cached file has the right size and, if `check`, the right hash."""
    try:
        if not place.is_file() or place.stat().st_size != file.size:
            return False
        if not check:
            return True
        state.phase = "check"
        with open(place, "rb") as stream:
            return _digest(stream, file, state) == file.blob
    except OSError:
        return False


def _place(part: RepoPlan, file: RepoFile) -> Path:
    """Where a file would lie: among the blobs, or in the snapshot where links do not exist."""
    blob = storage(part.id) / "blobs" / file.blob
    return blob if blob.exists() else folder_of(part.id, part.sha) / file.name


def _drop(part: RepoPlan, file: RepoFile, state: State) -> None:
    """Remove a cached file that is not what it should be."""
    place = _place(part, file)
    if place.is_file():
        state.note = f"{file.name} in the cache was damaged: fetched again"
        state.total += file.size if place.stat().st_size == file.size else 0
    place.unlink(missing_ok=True)


def _lock(part: RepoPlan, file: RepoFile) -> Any:
    """Hold the lock that huggingface_hub takes too. Raises HubError when another has it."""
    from filelock import FileLock, Timeout

    folder = cache_folder() / ".locks" / storage(part.id).name
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / f"{file.blob}.lock").acquire(timeout=1)
    except Timeout as error:
        raise failure(
            "busy", f"{file.name} of {part.id} is being downloaded already: wait for it to end"
        ) from error


class Partial:
    """A file that is not whole yet, and the hash of what it holds. Appended to, never read."""

    def __init__(self, stream: BinaryIO, file: RepoFile) -> None:
        self.stream, self.file = stream, file
        self.hasher = _hasher(file)
        self.size = 0

    def take_up(self, state: State) -> None:
        """Hash what is there from before and go on at its end."""
        size = self.stream.seek(0, os.SEEK_END)
        if size > self.file.size:
            self.stream.truncate(0)
        elif size:
            state.phase, state.note = "check", f"{self.file.name}: goes on at {gb(size)}"
        self.stream.seek(0)
        while chunk := self.stream.read(CHUNK):
            state.check()
            self.hasher.update(chunk)
            self.size += len(chunk)

    def append(self, chunk: bytes) -> None:
        """Raises HubError when there is more than the file has, OSError when the disk is full."""
        if self.size + len(chunk) > self.file.size:
            self.clear()
            raise failure(
                "damaged", f"the Hub sends more of {self.file.name} than it has: check HF_ENDPOINT"
            )
        self.stream.write(chunk)
        self.hasher.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self.stream.seek(0)
        self.stream.truncate(0)
        self.hasher, self.size = _hasher(self.file), 0


def _fetch(part: RepoPlan, file: RepoFile, begun: Path, state: State) -> bool:
    """Fetch what is missing of `begun`; whether its hash is right. A wrong file is deleted."""
    with open(begun, "ab+") as stream:
        partial = Partial(stream, file)
        partial.take_up(state)
        failures = 0
        while partial.size < file.size:
            before = partial.size
            try:
                _stream(part, file, partial, state)
            except HubError as error:
                failures = failures + 1 if partial.size == before else 1
                _wait(error, failures, file, state)
        stream.flush()
        os.fsync(stream.fileno())
    if partial.hasher.hexdigest() == file.blob:
        return True
    begun.unlink()
    state.total += file.size
    return False


def _stream(part: RepoPlan, file: RepoFile, partial: Partial, state: State) -> None:
    """Append one answer of the Hub. Raises HubError, also when it ends too early."""
    from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

    state.phase, start = "connect", partial.size
    url = f"{constants().ENDPOINT}/{part.id}/resolve/{part.sha}/{quote(file.name)}"
    own = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    timeout = httpx.Timeout(float(constants().HF_HUB_DOWNLOAD_TIMEOUT), connect=CONNECT_SECONDS)
    ask = {"headers": headers() | own, "timeout": timeout, "follow_redirects": True}
    try:
        with explaining(part.id), get_session().stream("GET", url, **ask) as response:
            state.response = response
            state.check()
            hf_raise_for_status(response)
            if start and not _continues(response, start):
                state.total += start
                partial.clear()
            for chunk in response.iter_bytes():
                state.check()
                partial.append(chunk)
                state.phase, state.done = "download", state.done + len(chunk)
    except HubError:
        state.check()  # a read that was woken to end is no failure
        raise
    finally:
        state.response = None
    if partial.size < file.size:
        raise failure("network", f"the connection dropped in {file.name}", retry_after=0.0)


def _continues(response: Any, start: int) -> bool:
    """Whether the answer begins where we stopped; else it begins at the beginning."""
    answer = str(response.headers.get("Content-Range", ""))
    return response.status_code == 206 and answer.startswith(f"bytes {start}-")


def _wait(error: HubError, failures: int, file: RepoFile, state: State) -> None:
    """Wait before another try, in sight of the user; raises the error when none makes sense."""
    asked = error.retry_after
    can_retry = error.kind == "network" or asked is not None
    if not can_retry or failures >= TRIES or (asked or 0) > LONGEST_WAIT:
        if error.kind == "network":
            raise failure(
                "network",
                f"{file.name}: {error} (what has arrived is kept: the next try goes on there)",
            ) from error
        raise error
    wait = max(asked or 0.0, min(0.5 * 2 ** (failures - 1), 4.0))
    state.phase = "wait"
    state.note = f"{file.name}: {str(error).partition(':')[0]}; again in {wait:.1f} s"
    state.stop.wait(wait)
    state.check()


def _hasher(file: RepoFile) -> Any:
    if file.sha256:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)  # as git counts


def _digest(stream: BinaryIO, file: RepoFile, state: State) -> str:
    hasher = _hasher(file)
    while chunk := stream.read(CHUNK):
        state.check()
        hasher.update(chunk)
    return str(hasher.hexdigest())


@contextmanager
def _writing(file: RepoFile, folder: Path) -> Iterator[None]:
    """Turn a disk that is full or closed into one line; what has arrived is kept."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise failure(
                "disk",
                f"the disk of {cache_folder()} is full in the middle of {file.name}: free "
                f"{gb(file.size)} (medusa-chat models rm), then pull again: what has arrived is "
                "kept",
            ) from error
        raise failure(
            "disk",
            f"{folder} cannot be written ({error.strerror or error}): check its owner, or set "
            "HF_HOME to a folder of yours",
        ) from error
