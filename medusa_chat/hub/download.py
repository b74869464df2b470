"""pull(): run a DownloadPlan: each file resumed where it broke off and checked before it counts.

huggingface_hub 2.4 fetches with hf_hub_download, and http_get below it. Neither is used, since they
- delete what has arrived when a download breaks off, is stopped, or ends with its process;
- compare the size only, without Xet: a damaged file enters the cache;
- sleep through any Retry-After, so that a stop waits and the user sees nothing;
- write the ref first and link file by file: what broke off looks whole.
So its client, its headers and its lock bring the bytes into its folders. A file is called
`<hash>.incomplete` until its size and hash are what the Hub says.
"""

import errno
import hashlib
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from medusa_chat import paths
from medusa_chat.hub.cache import cache_folder, storage
from medusa_chat.hub.client import (
    HubError,
    constants,
    explaining,
    file_url,
    is_offline,
    offline_error,
    request_headers,
)
from medusa_chat.hub.download_plan import DownloadPlan, RepoPlan
from medusa_chat.hub.repo import RepoFile
from medusa_chat.units import gb

TICK_SECONDS = 0.2
SPEED_SECONDS = 5.0  # over which the speed is taken
STOP_SECONDS = 0.7  # how long a cancelled download may take to let go
CONNECT_SECONDS = 5.0
TRIES = 4  # in a row, without a byte in between
LONGEST_WAIT = 30.0  # what a busy Hub may ask for; longer, and the user decides
CHUNK = 1 << 20
DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@dataclass(frozen=True)
class DownloadEvent:
    """How a download stands. done, total: bytes fetched and to fetch, what was cached not counted.

    phase: "connect", "check" (hashing what is on disk), "download", "wait" (before another try),
    "cancelled" or "done". speed: bytes a second over the last seconds; left_seconds: at that speed;
    both None while unknown. note: what to tell besides, in a sentence.
    """

    phase: str
    file: str
    done: int
    total: int
    speed: float | None = None
    left_seconds: float | None = None
    note: str = ""


class Cancelled(Exception):
    """The download was stopped."""


def pull(
    plan: DownloadPlan, stop: threading.Event | None = None, check: bool = True
) -> Iterator[DownloadEvent]:
    """Fetch what is left of a plan: an event about five times a second, the last one "done".

    Closing the generator, or setting `stop`, ends it within a second; what was downloaded is kept,
    and the next pull resumes there. check: compare what is cached with the Hub's hashes and fetch
    what is damaged again. Raises HubError, before the first byte where it can be known.
    """
    if is_offline() and plan.left:
        raise offline_error(plan.id)
    if plan.refusal is not None:
        raise plan.refusal
    download = Download(plan, stop or threading.Event(), check)
    thread = threading.Thread(target=download.run, name="download", daemon=True)
    thread.start()
    try:
        while thread.is_alive() and not download.stop.is_set():
            yield download.event()
            thread.join(TICK_SECONDS)
    finally:
        if thread.is_alive():
            download.abort()
            thread.join(STOP_SECONDS)
    if download.error is not None and not isinstance(download.error, Cancelled):
        raise download.error
    if download.error is not None or thread.is_alive():
        yield DownloadEvent("cancelled", download.file, download.done, download.total)
    else:
        yield DownloadEvent("done", "", download.done, download.done, note=download.note)


class Download:
    """A plan that is being fetched: `run` writes in its thread, others read.

    total, done: bytes to fetch and fetched; phase, file, note: as in DownloadEvent; error: what
    ended it.
    """

    def __init__(self, plan: DownloadPlan, stop: threading.Event, check: bool) -> None:
        self.plan, self.stop, self.check = plan, stop, check
        self.total, self.done = plan.left, 0
        self.phase, self.file, self.note = "connect", "", ""
        self.error: Exception | None = None
        self._response: Any = None
        self._marks: deque[tuple[float, int]] = deque()  # when, and how much was done

    def event(self) -> DownloadEvent:
        speed = self._speed()
        left = (self.total - self.done) / speed if speed else None
        return DownloadEvent(self.phase, self.file, self.done, self.total, speed, left, self.note)

    def abort(self) -> None:
        """Ask the thread to end, and wake it from a read that waits for the server."""
        self.stop.set()
        response = self._response
        if response is None:
            return
        try:
            stream = response.extensions["network_stream"]
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except (OSError, KeyError, AttributeError, ValueError):
            pass  # closed already; else its timeout ends the thread

    def run(self) -> None:
        """Every file of every part, then each part's snapshot."""
        try:
            for part in self.plan.parts:
                for item in part.files:
                    self._check_stop()
                    self._ensure_cached(part, item.file)
            for part in self.plan.parts:
                with disk_errors(part.folder):
                    link_snapshot(part)
        except Exception as error:  # raised by pull, in the thread that waits
            self.error = error

    def _speed(self) -> float | None:
        """Bytes a second over the last seconds; None until there is something to go by."""
        now, done = time.monotonic(), self.done
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] > SPEED_SECONDS:
            self._marks.popleft()
        start, before = self._marks[0]
        return (done - before) / (now - start) if now - start > 0.5 and done > before else None

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise Cancelled

    def _ensure_cached(self, part: RepoPlan, file: RepoFile) -> None:
        """Make sure that the whole file is in the cache. Raises HubError, Cancelled."""
        self.file, self.note = file.name, ""
        blob = storage(part.id) / "blobs" / file.blob
        copy = part.folder / file.name  # where it is on a system without links
        place = copy if copy.is_file() and not blob.is_file() else blob
        partial = blob.with_name(f"{file.blob}.incomplete")
        with disk_errors(blob.parent, file):
            if self._is_intact(place, file):
                return
            if place.is_file():
                self.note = f"{file.name} in the cache was damaged: downloaded again"
                self.total += file.size if place.stat().st_size == file.size else 0
            place.unlink(missing_ok=True)
            blob.parent.mkdir(parents=True, exist_ok=True)
            with _locked(blob, file):
                if blob.is_file() and blob.stat().st_size == file.size:
                    return  # another process was faster
                for _ in range(2):
                    if self._fetch(part, file, partial):
                        paths.replace(partial, blob)
                        return
                    self.note = f"{file.name} is damaged: downloading it again"
        raise HubError(
            f"{file.name} of {part.id} is damaged (its hash differs from the Hub's): try again "
            "later, or on another network",
            "damaged",
        )

    def _is_intact(self, place: Path, file: RepoFile) -> bool:
        """Whether a cached file has the right size and, where that is asked, the right hash."""
        try:
            if not place.is_file() or place.stat().st_size != file.size:
                return False
            if not self.check:
                return True
            self.phase = "check"
            with open(place, "rb") as stream:
                return self._hash_rest(stream, _hasher(file)) == file.blob
        except OSError:
            return False

    def _hash_rest(self, stream: BinaryIO, hasher: Any) -> str:
        """The hash when the rest of a stream is added. Raises Cancelled."""
        while chunk := stream.read(CHUNK):
            self._check_stop()
            hasher.update(chunk)
        return str(hasher.hexdigest())

    def _fetch(self, part: RepoPlan, file: RepoFile, place: Path) -> bool:
        """Fetch what is missing of a partial file; whether its hash is right. Deletes a wrong
        one."""
        with open(place, "ab+") as stream:
            partial = PartialFile(stream, file)
            if partial.size:
                self.phase = "check"
                self.note = f"{file.name}: resuming at {gb(partial.size)}"
                self._hash_rest(stream, partial.hasher)
            failures = 0
            while partial.size < file.size:
                before = partial.size
                try:
                    self._stream(part, partial)
                except HubError as error:
                    failures = failures + 1 if partial.size == before else 1
                    self._wait(error, failures)
        if partial.hasher.hexdigest() == file.blob:
            return True
        place.unlink()
        self.total += file.size
        return False

    def _stream(self, part: RepoPlan, partial: "PartialFile") -> None:
        """Append one answer of the Hub. Raises HubError, also when it ends too early."""
        from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

        file, start = partial.file, partial.size
        self.phase = "connect"
        own = {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        silence = float(constants().HF_HUB_DOWNLOAD_TIMEOUT)
        options = {
            "headers": request_headers() | own,
            "timeout": httpx.Timeout(silence, connect=CONNECT_SECONDS),
            "follow_redirects": True,
        }
        url = file_url(part.id, part.sha, file.name)
        try:
            with explaining(part.id), get_session().stream("GET", url, **options) as response:
                self._response = response
                self._check_stop()
                hf_raise_for_status(response)
                answered = response.headers.get("Content-Range", "")
                if start and not answered.startswith(f"bytes {start}-"):  # a server without ranges
                    self.total += start
                    partial.clear()
                for chunk in response.iter_bytes():
                    self._check_stop()
                    partial.append(chunk)
                    self.phase, self.done = "download", self.done + len(chunk)
                    if partial.size > file.size:
                        return  # it is damaged, as its hash tells
        except HubError:
            self._check_stop()  # a read that was woken to end is no failure
            raise
        finally:
            self._response = None
        if partial.size < file.size:
            raise HubError(f"the connection dropped in {file.name}", "network", retry_after=0.0)

    def _wait(self, error: HubError, failures: int) -> None:
        """Wait before another try, in sight of the user; raises the error when none makes sense."""
        asked = error.retry_after or 0.0
        can_retry = error.kind == "network" or error.retry_after is not None
        if not can_retry or failures >= TRIES or asked > LONGEST_WAIT:
            if error.kind != "network":
                raise error
            raise HubError(
                f"{self.file}: {error} (what was downloaded is kept: the next try resumes there)",
                "network",
            ) from error
        wait = max(asked, min(0.5 * 2 ** (failures - 1), 4.0))
        self.phase = "wait"
        self.note = f"{self.file}: {str(error).partition(':')[0]}; again in {wait:.1f} s"
        self.stop.wait(wait)
        self._check_stop()


class PartialFile:
    """A file that is not whole yet, and the hash of what it holds."""

    def __init__(self, stream: BinaryIO, file: RepoFile) -> None:
        self.stream, self.file = stream, file
        self.size, self.hasher = stream.seek(0, os.SEEK_END), _hasher(file)
        if self.size > file.size:
            self.clear()
        stream.seek(0)

    def append(self, chunk: bytes) -> None:
        self.stream.write(chunk)
        self.hasher.update(chunk)
        self.size += len(chunk)

    def clear(self) -> None:
        self.stream.seek(0)
        self.stream.truncate(0)
        self.size, self.hasher = 0, _hasher(self.file)


def _hasher(file: RepoFile) -> Any:
    """SHA-256 of the content for a large file, git's SHA-1 for a small one."""
    if len(file.blob) == 64:
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


@contextmanager
def _locked(blob: Path, file: RepoFile) -> Iterator[None]:
    """Hold the lock that huggingface_hub takes too. Raises HubError when another has it."""
    from filelock import Timeout
    from huggingface_hub.utils import WeakFileLock

    folder = cache_folder() / ".locks" / blob.parent.parent.name
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        try:
            held.enter_context(WeakFileLock(folder / f"{file.blob}.lock", timeout=1))
        except Timeout as error:
            what = f"{file.name} is already being downloaded: wait until it is done"
            raise HubError(what, "busy") from error
        yield


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


def link_snapshot(part: RepoPlan) -> None:
    """Link the files into the snapshot, the weights last, then say which commit the revision is."""
    homes: dict[str, Path] = {}  # where a blob is, on a system without links
    for item in sorted(part.files, key=lambda item: item.file.size):
        blob, place = storage(part.id) / "blobs" / item.file.blob, part.folder / item.file.name
        home = homes.setdefault(item.file.blob, place)
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # a broken link
        try:
            os.symlink(os.path.relpath(blob, place.parent), place)
        except OSError:  # the file itself moves, as in huggingface_hub
            if blob.exists():
                paths.replace(blob, place)
            else:  # to another name of the same content
                partial = place.with_name(f"{place.name}.part")
                shutil.copyfile(home, partial)
                paths.replace(partial, place)
    if part.revision != part.sha:
        paths.write_text(storage(part.id) / "refs" / part.revision, part.sha)
