"""The line at the top of the page: which model, where, and what it does or cannot do."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from medusa_chat.decoding.drafters import kinds
from medusa_chat.messages import ModelInfo
from medusa_chat.runtime.model_lifecycle import ModelState
from medusa_chat.runtime.recent_models import RecentModel
from medusa_chat.ui.page.tree_view import to_line
from medusa_chat.units import gb, number, transfer

PHASES = {
    "start": "starting the model's process",
    "restart": "restarting the model's process",
    "resolve": "looking for the files",
    "download": "downloading",
    "read": "reading weights",
    "quantise": "quantising weights",
    "check": "checking weights",
    "warm up": "warming up",
}
PARTS = {
    "resolve": 0.1,
    "read": 0.2,
    "quantise": 0.3,
    "check": 0.7,
    "warm up": 0.9,
}  # of the time, about
LONGEST_NAME = 36  # characters in the bar
NOT_KNOWN = "not known"
NO_LICENCE = "not named in its files"
FOR_GUESTS = "The model could not be loaded here. Ask the person who shared this page."


def without_folders(name: str) -> str:
    """The last part of a path or of a Hub id: what the bar has room for, and what a guest may
    read of it."""
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]


def named(model: str, backbone: str) -> str:
    """A model as a guest may read it, with the backbone that its heads sit on."""
    return " on ".join(map(without_folders, filter(None, (model, backbone))))


@dataclass(frozen=True)
class Coming:
    """Models that were loaded before, and the one that is chosen now. recent: newest first. text,
    part: what happens before the load of that one, and how far it is, 0 to 1. told: why it was not
    loaded."""

    recent: Sequence[RecentModel] = ()
    text: str = ""
    part: float | None = None
    told: str = ""


NOTHING = Coming()


def status_line(
    state: ModelState,
    memory: int | None = None,
    is_guest: bool = False,
    coming: Coming = NOTHING,
) -> str:
    """JSON: facts of the loaded model, [name, text, why] each, and notes, the log of its load, else
    one sentence; the recent models, [name, its precision] each.

    part: how far loading is, 0 to 1. again: whether Load again is offered. memory: bytes the
    model's process holds. told: why another model was not loaded. halts: whether what is on can be
    cancelled. A guest is told which model answers, nothing of the machine's folders.
    """
    line: dict[str, Any] = {
        "status": state.status,
        "text": "",
        "part": None,
        "facts": [],
        "notes": [],
        "again": False,
        "recent": [[shown_name(one.name), one.made] for one in coming.recent],
        "told": coming.told,
        "halts": bool(coming.text),
        "is_guest": is_guest,
    }
    if state.model is not None:
        line |= _facts(state.model, memory)
        line["notes"] = [*filter(None, [_capital(state.message)]), *line["notes"]]
        line |= {"text": coming.text, "part": coming.part}
        line["told"] = "" if is_guest else coming.told or _capital(state.message)
        if is_guest:
            line |= {"notes": [], "facts": [[*fact[:2], ""] for fact in line["facts"]]}
    elif state.status == "loading":
        why = f"{_capital(state.message)}: " if state.message else "Loading: "
        now = phase_text(state, is_guest)
        line |= {"text": f"{why}{now} …", "part": part_of(state)}
    elif is_guest:
        line["text"] = FOR_GUESTS
    else:
        line |= {"text": _capital(state.message) or "No model is loaded.", "again": True}
    return to_line(line)


def waiting_text(state: ModelState, ahead: int) -> str:
    """What a request waits for. ahead: how many come before it."""
    if ahead:
        return f"waiting: {ahead} ahead"
    if state.status == "loading":
        return f"waiting for the model: {phase_text(state, True)} …"
    return "starting …"


def part_of(state: ModelState) -> float:
    """How far loading is, 0 to 1: of files that are fetched as told, else about."""
    return state.done / state.total if state.total else PARTS.get(state.phase, 0.0)


def phase_text(state: ModelState, is_guest: bool = False) -> str:
    """The current phase of loading, in words; what is told of files is not for guests."""
    words = ("" if is_guest else state.note) or PHASES.get(state.phase, state.phase)
    figures = transfer(state.done, state.total, state.rate) if state.total else []
    return ", ".join([words, *figures])


def _facts(model: ModelInfo, memory: int | None) -> dict[str, Any]:
    """The most important first: the bar shows the first three, the table of Details all."""
    name = shown_name(model.name)
    whole = f"{model.name} on {model.backbone}" if model.backbone else model.name
    about = f"{model.family}, {number(model.parameters)} parameters"
    own, _, parts = (model.memory or gb(model.memory_bytes)).partition(": ")
    process = f"; its process holds {gb(memory)} of main memory now" if memory else ""
    return {
        "facts": [
            ["model", name, about if whole == name else f"{whole}: {about}"],
            ["precision", model.precision, ""],
            ["device", model.device, ""],
            ["memory", own, f"{parts}{process}".strip("; ")],
            ["context", f"{model.context:,} tokens", ""],
            ["drafter", _drafters(model), ""],
            ["tree", _tree(model), model.tree_reason],
            ["backend", model.backend or NOT_KNOWN, ""],
            ["template", model.template or NOT_KNOWN, ""],
            ["licence", model.licence or NO_LICENCE, ""],
        ],
        "notes": list(model.notes),
    }


def _drafters(model: ModelInfo) -> str:
    """What may draft for it, the first by --drafter auto."""
    sizes = {
        kinds.MEDUSA.name: f", {model.heads} heads",
        model.beside: f", {' and '.join(map(without_folders, model.drafts))}",
    }
    every = kinds.kinds_of(model.heads, model.beside)
    return "; ".join(f"{kind.label}{sizes.get(kind.name, '')}" for kind in every)


def _tree(model: ModelInfo) -> str:
    """An automatic tree has another size at every step; the steps tell it."""
    return model.tree if model.tree == "auto" else f"{model.tree}, {model.nodes} nodes"


def shown_name(name: str) -> str:
    """A name that fits into the bar: of a long one its end, which is where folders differ."""
    name = without_folders(name)
    return name if len(name) <= LONGEST_NAME else f"…{name[1 - LONGEST_NAME :]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
