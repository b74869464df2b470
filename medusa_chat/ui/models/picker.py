"""ModelPicker: one model chosen in the page at a time, and what the Models tab shows of its load.

No gradio. While it is looked at and downloaded the present model goes on answering; only when every
file is there does the session change over, in its turn.
"""

import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from medusa_chat import hub
from medusa_chat.errors import MedusaChatError, UsageError, first_line
from medusa_chat.hub import DownloadEvent, gb
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo
from medusa_chat.runtime.requests import Switch, Ticket
from medusa_chat.runtime.session import Session
from medusa_chat.ui.models.checkpoint_lookup import CheckpointKey, Detail
from medusa_chat.ui.models.model_catalog import ModelCatalog

Stage = Literal["idle", "checking", "downloading", "loading", "done", "failed", "stopped"]
RUNNING = ("checking", "downloading", "loading")
STOPPED_BEFORE = "stopped; what was downloaded is kept, and the model that is loaded stays"
STOPPED_LOADING = "stopped; the model that was there before is loaded again"
BOXES = {
    "omit --backbone": "leave the box for another backbone empty",
    "give --backbone ID|DIR, a model": "name another backbone, a model",
    "give --backbone ID|DIR": "name another backbone",
    "give another --backbone": "name another backbone",
    "choose one with --backbone": "name another backbone",
    "or give --backbone ": "or name another backbone: ",
    "--precision ": "precision ",
    "--max-context": "context",
    "remove a model with medusa-chat models rm": "delete a model below",
    "medusa-chat models search": "the search below",
    ", or use --offline": "",
    "omit --offline and HF_HUB_OFFLINE": "start without --offline and HF_HUB_OFFLINE",
}
PHASES = {"check": "checking existing files", "wait": "waiting to try again"}


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


def progress_card(
    progress: LoadProgress, ahead: int = 0, phase: str = "", part: float | None = None
) -> dict[str, Any]:
    """The card of a load: what happens, how far it is (part, 0 to 1), what became of it.

    ahead: answers that run or wait before it. phase, part: what loading does now, in words, and
    how far it is.
    """
    name = progress.request.checkpoint if progress.request else ""
    view: dict[str, Any] = {
        "stage": progress.stage,
        "text": "",
        "figures": "",
        "part": None,
        "link": progress.link,
        "is_running": progress.is_running,
    }
    if progress.stage == "checking":
        view["text"] = f"Looking at {name} …"
    elif progress.stage == "downloading":
        view |= _download(name, progress.download)
    elif progress.stage == "loading":
        what = "one answer" if ahead == 1 else f"{ahead} answers"
        now = f"{name} waits for {what} before it" if ahead else f"Loading {name}: {phase}"
        view |= {"text": f"{now} …", "part": None if ahead else part}
    elif progress.stage in ("failed", "stopped"):
        view["text"] = for_page(
            progress.error if name in progress.error else f"{name}: {progress.error}"
        )
    elif progress.stage == "done":
        view["text"] = f"{name} is loaded. The conversation continues with it."
    return view


def _download(name: str, event: DownloadEvent | None) -> dict[str, Any]:
    if event is None:
        return {"text": f"Downloading {name} …", "part": 0.0}
    figures = [f"{gb(event.done)} of {gb(event.total)}"]
    if event.speed:
        figures.append(f"{gb(event.speed)}/s")
    if event.left_seconds is not None:
        figures.append(f"{clock(event.left_seconds)} left")
    figures += [text for text in (event.file, PHASES.get(event.phase, ""), event.note) if text]
    part = event.done / event.total if event.total else 0.0
    return {"text": f"Downloading {name}", "figures": " · ".join(figures), "part": round(part, 3)}


def for_page(text: str) -> str:
    """A command-line message reworded for the page: boxes and buttons instead of options."""
    for flag, box in BOXES.items():
        text = text.replace(flag, box)
    return text


def clock(seconds: float) -> str:
    """1:05, or 2:03:04."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def loaded_view(model: ModelInfo | None, request: LoadRequest | None) -> dict[str, Any] | None:
    """The model that is there, with its memory; None before there is one."""
    if model is None:
        return None
    return {
        "name": request.checkpoint if request else model.name,
        "facts": ", ".join(
            [
                *([f"backbone {model.backbone}"] if model.backbone else []),
                f"{model.precision} on {model.device}",
                f"context {model.context:,} tokens",
            ]
        ),
        "memory": model.memory or gb(model.memory_bytes),
    }
