"""pull(): execute a DownloadPlan. Downloads resume, and every file is verified by its hash.

hf_hub_download and http_get of huggingface_hub 2.4 are not used, because they
- delete a partial file when a download fails, is stopped, or its process ends;
- compare only the size (without Xet), so a damaged file enters the cache;
- sleep through any Retry-After, where a stop has to wait and the user sees nothing;
- write the ref first and link file by file, so a partial snapshot looks complete.
Here its HTTP client, headers and locks write into its cache. A file is named `<hash>.incomplete`
until its size and hash match the Hub's.
"""

import errno
import hashlib
import os
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from medusa_chat import paths
from medusa_chat.hub import client
from medusa_chat.hub.cache import cache_folder, size_of, storage
from medusa_chat.hub.client import HubError
from medusa_chat.hub.download_plan import DownloadPlan, RepoPlan
from medusa_chat.hub.repo import RepoFile
from medusa_chat.units import gb

TICK_SECONDS = 0.2
SPEED_SECONDS = 5.0  # over which the speed is averaged
STOP_SECONDS = 0.7  # to wait for a cancelled download to end
CONNECT_SECONDS = 5.0
TRIES = 4  # in a row that transfer no byte
LONGEST_WAIT = 30.0  # before a retry; if the Hub asks for more, the download fails
CHUNK = 1 << 20
DISK_FULL = {errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC)}


@dataclass(frozen=True)
class DownloadEvent:
    """The progress of a download. done, total: bytes to download, without what was cached.

    phase: "connect", "check" (hashing files on disk), "download", "wait" (before a retry),
    "cancelled" or "done". speed: bytes per second over SPEED_SECONDS; left_seconds: at that speed;
    None while unknown. note: a sentence for the user, or empty.
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
) -> Generator[DownloadEvent, None, None]:
    """Download what is missing of a plan; yields about five events per second, the last is "done".

    Closing the generator or setting `stop` ends it within a second; partial files are kept, and the
    next pull resumes them. check: verify the hashes of cached files, and download damaged ones
    again. Raises HubError, before the first byte if possible.
    """
    if client.is_offline() and plan.left:
        raise client.offline_error(plan.id)
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
    """A running download: `run` writes the attributes in its thread, others read them.

    total, done, phase, file, note: as in DownloadEvent. error: what ended it.
    """

    def __init__(self, plan: DownloadPlan, stop: threading.Event, check: bool) -> None:
        self.plan, self.stop, self.check = plan, stop, check
        self.total, self.done = plan.left, 0
        self.phase, self.file, self.note = "connect", "", ""
        self.error: Exception | None = None
        self._response: Any = None
        self._marks: deque[tuple[float, int]] = deque()  # (time, bytes done)

    def event(self) -> DownloadEvent:
        speed = self._speed()
        left = (self.total - self.done) / speed if speed else None
        return DownloadEvent(self.phase, self.file, self.done, self.total, speed, left, self.note)

    def abort(self) -> None:
        """Tell the thread to stop, and interrupt a read that waits for the server."""
        self.stop.set()
        response = self._response
        if response is None:
            return
        try:
            stream = response.extensions["network_stream"]
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except (OSError, KeyError, AttributeError, ValueError):
            pass  # already closed; otherwise the timeout ends the thread

    def run(self) -> None:
        """Download every file, then link the snapshots."""
        try:
            for part in self.plan.parts:
                for file in part.files:
                    self._check_stop()
                    self._ensure_cached(part, file)
            for part in self.plan.parts:
                with disk_errors(part.folder):
                    link_snapshot(part)
        except Exception as error:  # `pull` raises it in the waiting thread
            self.error = error

    def _speed(self) -> float | None:
        """Bytes per second over SPEED_SECONDS; None at the start."""
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
        """Download a file unless it is intact in the cache. Raises HubError, Cancelled."""
        from huggingface_hub.utils import WeakFileLock

        self.file, self.note = file.name, ""
        blob = storage(part.id) / "blobs" / file.blob
        copy = part.folder / file.name  # its place on a system without links
        place = copy if copy.is_file() and not blob.is_file() else blob
        partial = blob.with_name(f"{file.blob}.incomplete")
        lock = cache_folder() / ".locks" / storage(part.id).name / f"{file.blob}.lock"
        with disk_errors(blob.parent, file):
            if self._is_intact(place, file):
                return
            if (size := size_of(place)) >= 0:
                self.note = f"{file.name} was damaged in the cache: downloading it again"
                self.total += file.size if size == file.size else 0  # else already counted
            place.unlink(missing_ok=True)
            for folder in (blob.parent, lock.parent):
                folder.mkdir(parents=True, exist_ok=True)
            with WeakFileLock(lock, timeout=1):  # huggingface_hub uses the same lock
                if size_of(blob) == file.size:
                    return  # by another process
                for _ in range(2):
                    if self._fetch(part, file, partial):
                        paths.replace(partial, blob)
                        return
                    self.note = f"{file.name} is damaged: downloading it again"
        what = f"{file.name} of {part.id} arrived damaged (wrong hash)"
        raise HubError(f"{what}: try again later, or on another network", "damaged")

    def _is_intact(self, place: Path, file: RepoFile) -> bool:
        """Whether a cached file has the right size and, if `check` is set, the right hash."""
        if size_of(place) != file.size or not self.check:
            return size_of(place) == file.size
        with suppress(OSError):
            return self._hash(place, file) == file.blob
        return False

    def _hash(self, place: Path, file: RepoFile) -> str:
        """The file's SHA-256, or git's SHA-1, whichever the Hub gives. Raises Cancelled."""
        self.phase = "check"
        hasher: Any = hashlib.sha256()
        if len(file.blob) != len(hasher.hexdigest()):
            hasher = hashlib.sha1(b"blob %d\0" % size_of(place), usedforsecurity=False)
        with open(place, "rb") as stream:
            while chunk := stream.read(CHUNK):
                self._check_stop()
                hasher.update(chunk)
        return str(hasher.hexdigest())

    def _fetch(self, part: RepoPlan, file: RepoFile, place: Path) -> bool:
        """Complete a partial file; returns whether its hash is right, and deletes it if not."""
        with open(place, "ab") as stream:
            if size := stream.tell():
                self.note = f"{file.name}: resuming at {gb(size)}"
            failures = 0
            while stream.tell() < file.size:
                before = stream.tell()
                try:
                    self._stream(part, file, stream)
                except HubError as error:
                    failures = failures + 1 if stream.tell() == before else 1
                    self._wait(error, failures)
        if self._hash(place, file) == file.blob:
            return True
        place.unlink()
        self.total += file.size
        return False

    def _stream(self, part: RepoPlan, file: RepoFile, stream: BinaryIO) -> None:
        """Append one response of the Hub. Raises HubError, also if the response is too short."""
        from huggingface_hub.utils import get_session, hf_raise_for_status, httpx

        self.phase, start = "connect", stream.tell()
        url, headers = client.file_url(part.id, part.sha, file.name), client.request_headers()
        headers |= {"Accept-Encoding": "identity"} | ({"Range": f"bytes={start}-"} if start else {})
        silence = float(client.constants().HF_HUB_DOWNLOAD_TIMEOUT)
        timeout = httpx.Timeout(silence, connect=CONNECT_SECONDS)
        try:
            with (
                client.hub_errors(part.id),
                get_session().stream("GET", url, headers=headers, timeout=timeout) as response,
            ):
                self._response = response
                self._check_stop()
                hf_raise_for_status(response)
                answered = response.headers.get("Content-Range", "")
                if start and not answered.startswith(
                    f"bytes {start}-"
                ):  # the server ignores ranges
                    self.total += start
                    stream.seek(0)
                    stream.truncate()
                for chunk in response.iter_bytes():
                    self._check_stop()
                    stream.write(chunk)
                    self.phase, self.done = "download", self.done + len(chunk)
                    if stream.tell() > file.size:
                        return  # too long: its hash will be wrong
        except HubError:
            self._check_stop()  # `abort` interrupts a read
            raise
        finally:
            self._response = None
        if stream.tell() < file.size:
            raise HubError(
                f"the connection was lost while downloading {file.name}", "network", retry_after=0.0
            )

    def _wait(self, error: HubError, failures: int) -> None:
        """Wait before a retry, and report it; raises the error if a retry is useless."""
        asked = error.retry_after or 0.0
        can_retry = error.kind == "network" or error.retry_after is not None
        if not can_retry or failures >= TRIES or asked > LONGEST_WAIT:
            if error.kind != "network":
                raise error
            kept = "the partial file is kept, and the next download resumes it"
            raise HubError(f"{self.file}: {error} ({kept})", "network") from error
        wait = max(asked, min(0.5 * 2 ** (failures - 1), 4.0))
        self.phase = "wait"
        self.note = f"{self.file}: {str(error).partition(':')[0]}; retrying in {wait:.1f} s"
        self.stop.wait(wait)
        self._check_stop()


@contextmanager
def disk_errors(folder: Path, file: RepoFile | None = None) -> Iterator[None]:
    """Turn a full disk, a folder that cannot be written and a locked file into a HubError."""
    from filelock import Timeout

    try:
        yield
    except OSError as error:
        if file and isinstance(error, Timeout):
            what = f"another process is downloading {file.name}: wait until it is done"
            raise HubError(what, "busy") from error
        if file and error.errno in DISK_FULL:
            what = f"the disk of {cache_folder()} is full while downloading {file.name}"
            then = f"free {gb(file.size)} (medusa-chat models rm), then pull again to resume"
            raise HubError(f"{what}: {then}", "disk") from error
        what = f"cannot write to {folder} ({error.strerror or error})"
        then = "check its permissions, or set HF_HOME to another folder"
        raise HubError(f"{what}: {then}", "disk") from error


def link_snapshot(part: RepoPlan) -> None:
    """Link the files into the snapshot, the weights last, then write the ref."""
    homes: dict[str, Path] = {}  # blob -> its file, on a system without links
    for file in sorted(part.files, key=lambda file: file.size):
        blob, place = storage(part.id) / "blobs" / file.blob, part.folder / file.name
        home = homes.setdefault(file.blob, place)
        if place.exists():
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)  # a broken link
        try:
            os.symlink(os.path.relpath(blob, place.parent), place)
        except OSError:  # no links: move the file, as huggingface_hub does
            if blob.exists():
                paths.replace(blob, place)
            else:  # a second file with the same content
                partial = place.with_name(f"{place.name}.part")
                shutil.copyfile(home, partial)
                paths.replace(partial, place)
    if part.revision != part.sha:
        paths.write_text(storage(part.id) / "refs" / part.revision, part.sha)
