"""ModelPicker: one model chosen in the page at a time: looked at, downloaded, loaded. No gradio.

While it is looked at and downloaded the present model goes on answering; only when every file is
there does the session change over, in its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal

from medusa_chat import hub
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.runtime.requests import Switch, Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, Detail
from medusa_chat.ui.models.model_catalog import ModelCatalog

Stage = Literal["idle", "checking", "downloading", "loading", "done", "failed", "stopped"]
RUNNING = ("checking", "downloading", "loading")
STOPPED_BEFORE = "stopped; what was downloaded is kept, and the model that is loaded stays"
STOPPED_LOADING = "stopped; the model that was there before is loaded again"


@dataclass(frozen=True)
class LoadProgress:
    """How far it is. download: while "downloading". switch: while "loading", in the session's
    queue. error: why it "failed" or what became of it when "stopped"; link: a page for that.
    """

    request: LoadRequest | None = None
    stage: Stage = "idle"
    detail: Detail | None = None
    download: hub.DownloadEvent | None = None
    switch: Ticket[LoadPhase] | None = None
    error: str = ""
    link: str = ""

    @property
    def is_running(self) -> bool:
        return self.stage in RUNNING


@dataclass
class ModelPicker:
    """The choice of all browser tabs together: there is one model."""

    session: Session
    catalog: ModelCatalog
    progress: LoadProgress = field(default_factory=LoadProgress)
    _turn: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begin(self, request: LoadRequest, key: CheckpointKey) -> threading.Thread:
        """Begin to load; key: what is looked at first. Raises UsageError while another is on."""
        with self._lock:
            if self.progress.is_running and self.progress.request is not None:
                name = self.progress.request.checkpoint
                raise UsageError(f"{name} is being loaded: wait for it, or cancel it first")
            self._turn += 1
            self._stop = threading.Event()
            self.progress = LoadProgress(request, "checking")
            run = (self._turn, self._stop, request, key)
            thread = threading.Thread(target=self._run, args=run, name="picker", daemon=True)
        thread.start()
        return thread

    def cancel(self) -> None:
        """Give up what is on, at once; the model that was there stays or comes back."""
        with self._lock:
            if not self.progress.is_running:
                return
            self._turn += 1
            self._stop.set()
            switch = self.progress.switch
            is_begun = switch is not None and switch.state == "running"
            said = STOPPED_LOADING if is_begun else STOPPED_BEFORE
            self.progress = replace(self.progress, stage="stopped", error=said, download=None)
        if switch is not None:
            self.session.cancel(switch)

    def close(self) -> None:
        """Take the last outcome from the page."""
        with self._lock:
            if not self.progress.is_running:
                self.progress = LoadProgress()

    def _run(
        self, turn: int, stop: threading.Event, request: LoadRequest, key: CheckpointKey
    ) -> None:
        progress = LoadProgress(request, "checking")
        try:
            for told in self._steps(progress, stop, key):
                progress = told
                if not self._tell(turn, progress):
                    return
        except MedusaChatError as error:
            link = getattr(error, "link", "")
            self._tell(turn, replace(progress, stage="failed", error=str(error), link=link))
        except Exception as error:  # shown on the page: the app itself goes on
            said = f"unexpected {type(error).__name__}: {first_line(error)}"
            self._tell(turn, replace(progress, stage="failed", error=said))

    def _steps(
        self, progress: LoadProgress, stop: threading.Event, key: CheckpointKey
    ) -> Iterator[LoadProgress]:
        assert progress.request is not None
        detail = self.catalog.refresh(key)
        progress = replace(progress, detail=detail)
        if detail.error:
            yield replace(progress, stage="failed", error=detail.error, link=detail.link)
            return
        if detail.needs is not None and detail.needs.left:
            yield (progress := replace(progress, stage="downloading"))
            with closing(hub.pull(detail.needs, stop, check=False)) as events:
                for event in events:
                    yield replace(progress, download=event)
            self.catalog.forget()
        if stop.is_set():
            return
        switch = self.session.submit(Switch(progress.request))
        yield (progress := replace(progress, stage="loading", switch=switch))
        switch.done.wait()
        if switch.error:
            yield replace(progress, stage="failed", error=switch.error)
        else:
            yield replace(progress, stage="done")

    def _tell(self, turn: int, progress: LoadProgress) -> bool:
        """Show it, unless it was given up; then whatever was begun of it ends."""
        with self._lock:
            if turn == self._turn:
                self.progress = progress
                return True
        if progress.switch is not None:
            self.session.cancel(progress.switch)
        return False
