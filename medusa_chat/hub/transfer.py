"""One file from the Hub to the cache: resumed where it broke off, and checked before it counts.

huggingface_hub 2.4 fetches with hf_hub_download, and http_get below it. Neither is used, since they
- delete what has arrived when a download breaks off, is stopped, or ends with its process;
- compare the size only, without Xet: a damaged file enters the cache;
- read 10 MB at a time, and lose what is left of them with the connection;
- sleep through any Retry-After, so that a stop waits and the user is told nothing.
So its client, its headers and its lock bring the bytes into its folders. A file is called
`<hash>.incomplete` until its size and hash are what the Hub says.
"""

import errno
import hashlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from medusa_chat.hub.cache import cache_folder, storage
from medusa_chat.hub.client import (
    HubError,
    constants,
    explaining,
    file_path,
    request_headers,
)
from medusa_chat.hub.download_plan import RepoPlan, places_of
from medusa_chat.hub.repo import RepoFile
from medusa_chat.units import gb

CONNECT_SECONDS = 5.0
CHUNK = 1 << 20
TRIES = 4  # in a row, without a byte in between
LONGEST_WAIT = 30.0  # what a busy Hub may ask for; longer, and the user decides
DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


class Cancelled(Exception):
    """The download was stopped."""


@dataclass
class TransferState:
    """How a download stands: written by its thread, read by others. total, done: bytes to fetch."""

    total: int
    done: int = 0
    phase: str = "connect"
    file: str = ""
    note: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    response: Any = None

    def check(self) -> None:
        """Raises Cancelled once the download is to stop."""
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
            pass  # closed already; else its timeout ends the thread


def ensure_cached(part: RepoPlan, file: RepoFile, state: TransferState, check: bool) -> None:
    """Make sure that the whole `file` is in the cache. check: compare a cached file's hash as well.

    Raises HubError, Cancelled.
    """
    state.file, state.note = file.name, ""
    blob = storage(part.id) / "blobs" / file.blob
    partial = blob.with_name(f"{file.blob}.incomplete")
    with _disk_errors(file, blob.parent):
        place = next((p for p in places_of(part.id, part.sha, file) if p.is_file()), blob)
        if _is_intact(place, file, state, check):
            return
        _discard(place, file, state)
        blob.parent.mkdir(parents=True, exist_ok=True)
        with _locked(part, file):
            if _is_intact(blob, file, state, check=False):  # another process was faster
                return
            for _ in range(2):
                if _fetch(part, file, partial, state):
                    os.replace(partial, blob)
                    return
                state.note = f"{file.name} arrived damaged: once more"
    raise HubError(
        f"{file.name} of {part.id} arrives damaged (its hash is not what the Hub says): try again "
        "later, or on another network",
        "damaged",
    )


def _is_intact(place: Path, file: RepoFile, state: TransferState, check: bool) -> bool:
    """Whether a cached file has the right size and, if `check`, the right hash."""
    try:
        if not place.is_file() or place.stat().st_size != file.size:
            return False
        if not check:
            return True
        state.phase = "check"
        with open(place, "rb") as stream:
            hasher = _hasher(file)
            _hash_rest(stream, hasher, state)
        return str(hasher.hexdigest()) == file.blob
    except OSError:
        return False


def _discard(place: Path, file: RepoFile, state: TransferState) -> None:
    """Remove a cached file that is not what it should be."""
    if place.is_file():
        state.note = f"{file.name} in the cache was damaged: fetched again"
        state.total += file.size if place.stat().st_size == file.size else 0
    place.unlink(missing_ok=True)


@contextmanager
def _locked(part: RepoPlan, file: RepoFile) -> Iterator[None]:
    """Hold the lock that huggingface_hub takes too. Raises HubError when another has it."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    folder = cache_folder() / ".locks" / storage(part.id).name
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(folder / f"{file.blob}.lock", timeout=1))
        except Timeout as error:
            raise HubError(
                f"{file.name} of {part.id} is being downloaded already: wait for it to end", "busy"
            ) from error
        yield


class PartialFile:
    """A file that is not whole yet, and the hash of what it holds. Only appended to."""

    def __init__(self, stream: BinaryIO, file: RepoFile) -> None:
        self.stream, self.file = stream, file
        self.hasher = _hasher(file)
        self.size = 0

    def resume(self, state: TransferState) -> None:
        """Hash what is there from before, to go on at its end."""
        size = self.stream.seek(0, os.SEEK_END)
        if size > self.file.size:
            return self.clear()
        if size:
            state.phase, state.note = "check", f"{self.file.name}: goes on at {gb(size)}"
        self.stream.seek(0)
        self.size = _hash_rest(self.stream, self.hasher, state)

    def append(self, chunk: bytes) -> None:
        """Raises HubError when there is more than the file has, OSError when the disk is full."""
        if self.size + len(chunk) > self.file.size:
            self.clear()
            raise HubError(
                f"the Hub sends more of {self.file.name} than it has: check HF_ENDPOINT", "damaged"
            )
        self.stream.write(chunk)
        self.hasher.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self.stream.seek(0)
        self.stream.truncate(0)
        self.hasher, self.size = _hasher(self.file), 0


def _fetch(part: RepoPlan, file: RepoFile, place: Path, state: TransferState) -> bool:
    """Fetch what is missing of a partial file; whether its hash is right. Deletes a wrong one."""
    with open(place, "ab+") as stream:
        partial = PartialFile(stream, file)
        partial.resume(state)
        failures = 0
        while partial.size < file.size:
            before = partial.size
            try:
                _stream(part, partial, state)
            except HubError as error:
                failures = failures + 1 if partial.size == before else 1
                _wait(error, failures, file, state)
        stream.flush()
        os.fsync(stream.fileno())
    if partial.hasher.hexdigest() == file.blob:
        return True
    place.unlink()
    state.total += file.size
    return False


def _stream(part: RepoPlan, partial: PartialFile, state: TransferState) -> None:
    """Append one answer of the Hub. Raises HubError, also when it ends too early."""
    from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

    file, start = partial.file, partial.size
    state.phase = "connect"
    url = f"{constants().ENDPOINT}/{file_path(part.id, part.sha, file.name)}"
    own = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
    timeout = httpx.Timeout(float(constants().HF_HUB_DOWNLOAD_TIMEOUT), connect=CONNECT_SECONDS)
    ask = {"headers": request_headers() | own, "timeout": timeout, "follow_redirects": True}
    try:
        with explaining(part.id), get_session().stream("GET", url, **ask) as response:
            state.response = response
            state.check()
            hf_raise_for_status(response)
            answered = response.headers.get("Content-Range", "")
            if start and not answered.startswith(f"bytes {start}-"):  # it begins at the beginning
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
        raise HubError(f"the connection dropped in {file.name}", "network", retry_after=0.0)


def _wait(error: HubError, failures: int, file: RepoFile, state: TransferState) -> None:
    """Wait before another try, in sight of the user; raises the error when none makes sense."""
    asked = error.retry_after or 0.0
    can_retry = error.kind == "network" or error.retry_after is not None
    if not can_retry or failures >= TRIES or asked > LONGEST_WAIT:
        if error.kind != "network":
            raise error
        raise HubError(
            f"{file.name}: {error} (what has arrived is kept: the next try goes on there)",
            "network",
        ) from error
    wait = max(asked, min(0.5 * 2 ** (failures - 1), 4.0))
    state.phase = "wait"
    state.note = f"{file.name}: {str(error).partition(':')[0]}; again in {wait:.1f} s"
    state.stop.wait(wait)
    state.check()


def _hasher(file: RepoFile) -> Any:
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
def _disk_errors(file: RepoFile, folder: Path) -> Iterator[None]:
    """Turn a disk that is full or closed into one line; what has arrived is kept."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
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
