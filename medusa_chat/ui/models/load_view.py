"""How a load goes and what was loaded, as data for the Models tab. No gradio."""

from typing import Any

from medusa_chat.hub import DownloadEvent, gb
from medusa_chat.messages import LoadRequest, ModelInfo
from medusa_chat.ui.models.picker import LoadProgress

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
