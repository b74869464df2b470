"""pull(): run a DownloadPlan, tell how it goes, and link the snapshot when all files are there.

huggingface_hub 2.4 writes the ref first and links file by file: what broke off looks whole.
"""

import os
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from medusa_chat import paths
from medusa_chat.hub.cached_file import disk_errors
from medusa_chat.hub.download_plan import DownloadPlan
from medusa_chat.hub.environment import is_offline
from medusa_chat.hub.errors import offline_error
from medusa_chat.hub.repo_plan import RepoPlan
from medusa_chat.hub.transfer import ensure_cached
from medusa_chat.hub.transfer_state import Cancelled, TransferState

TICK_SECONDS = 0.2
WINDOW_SECONDS = 5.0  # over which the speed is taken
END_SECONDS = 0.7  # how long a cancelled download may take to let go


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
    state = TransferState(plan.left, stop=stop or threading.Event())
    raised: list[Exception] = []
    thread = threading.Thread(
        target=_run, args=(plan, state, check, raised), name="download", daemon=True
    )
    speed = Speed()
    thread.start()
    try:
        while thread.is_alive() and not state.stop.is_set():
            yield _event(state, speed)
            thread.join(TICK_SECONDS)
    finally:
        if thread.is_alive():
            state.abort()
            thread.join(END_SECONDS)
    if raised and not isinstance(raised[0], Cancelled):
        raise raised[0]
    if raised or thread.is_alive():
        yield DownloadEvent("cancelled", state.file, state.done, state.total)
        return
    yield DownloadEvent("done", "", state.done, state.done, note=state.note)


class Speed:
    """Bytes a second over the last seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque()

    def at(self, done: int) -> float | None:
        """None until there is something to go by."""
        now = time.monotonic()
        self._marks.append((now, done))
        while len(self._marks) > 2 and now - self._marks[1][0] > WINDOW_SECONDS:
            self._marks.popleft()
        start, before = self._marks[0]
        return (done - before) / (now - start) if now - start > 0.5 and done > before else None


def _event(state: TransferState, speed: Speed) -> DownloadEvent:
    rate = speed.at(state.done)
    left = (state.total - state.done) / rate if rate else None
    return DownloadEvent(state.phase, state.file, state.done, state.total, rate, left, state.note)


def _run(plan: DownloadPlan, state: TransferState, check: bool, raised: list[Exception]) -> None:
    """In the thread: every file of every part, then each part's snapshot. raised: its error, for
    whoever waits."""
    try:
        for part in plan.parts:
            for item in part.files:
                state.check()
                ensure_cached(part, item.file, state, check)
        for part in plan.parts:
            with disk_errors(part.folder):
                _link_snapshot(part)
    except Exception as error:  # Cancelled and HubError too
        raised.append(error)


def _link_snapshot(part: RepoPlan) -> None:
    """Link the files into the snapshot and, last of all, say which commit the revision is."""
    moved: dict[Path, Path] = {}  # where a blob is, on a system without links
    for item in part.files:
        blob, place = part.places(item.file)
        if place.exists() or not (blob.exists() or blob in moved):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        if blob in moved:  # another file has the same content
            partial = place.with_name(f"{place.name}.part")
            shutil.copyfile(moved[blob], partial)
            paths.replace(partial, place)
            continue
        try:
            os.symlink(os.path.relpath(blob, place.parent), place)
        except OSError:  # the file itself, as huggingface_hub does it
            paths.replace(blob, place)
            moved[blob] = place
    if part.revision != part.sha:
        paths.write_text(part.storage / "refs" / part.revision, part.sha)
