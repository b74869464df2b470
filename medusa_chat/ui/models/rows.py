"""Rows: the checkpoints to choose from, each once, with its figures before any click. No gradio."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from medusa_chat.checkpoints.inspection_report import Inspection
from medusa_chat.hub import CachedModel, Found, gb, is_repo_id
from medusa_chat.hub.catalog import ModelPreset
from medusa_chat.hub.environment import page
from medusa_chat.ui.models.checkpoint_lookup import NOT_ASKED, CheckpointKey, Detail
from medusa_chat.ui.models.load_form import LoadChoices, is_folder
from medusa_chat.ui.models.load_view import for_page
from medusa_chat.ui.models.memory_fit import Machine, cells, estimates, warning

DEMO = "demo"
CLOSED = "yes, its licence is not accepted yet"


@dataclass
class Entry:
    """One checkpoint with all that is known of it, from wherever."""

    id: str
    preset: ModelPreset | None = None
    cached: CachedModel | None = None
    found: Found | None = None
    detail: Detail | None = None

    @property
    def report(self) -> Inspection | None:
        return self.detail.report if self.detail else None

    @property
    def is_whole(self) -> bool:
        """Whether it has a backbone of its own, so that no other may be chosen."""
        if self.report is not None and self.report.heads is not None:
            return self.report.backbone == self.id
        return self.id == DEMO or (self.preset is not None and self.preset.base is None)

    @property
    def is_here(self) -> bool:
        return self.id == DEMO or (self.report is not None and self.report.is_here)

    def key(self, backbone: str | None) -> CheckpointKey:
        """What is looked up and loaded for it: a preset knows the base better than a config."""
        if self.is_whole:
            return CheckpointKey(self.id)
        return CheckpointKey(self.id, backbone or (self.preset.base if self.preset else None))


@dataclass
class Groups:
    """Entries in the order in which they are shown."""

    typed: list[Entry] = field(default_factory=list)
    known: list[Entry] = field(default_factory=list)
    found: list[Entry] = field(default_factory=list)
    here: list[Entry] = field(default_factory=list)

    def all(self) -> Iterator[tuple[str, Entry]]:
        """(the group's name, the entry)."""
        for name in ("typed", "known", "found", "here"):
            yield from ((name, entry) for entry in getattr(self, name))


def grouped(
    choices: LoadChoices,
    presets: Iterable[ModelPreset],
    cached: Iterable[CachedModel],
    found: Iterable[Found],
) -> Groups:
    """Each checkpoint once: what was typed, then what is known, found, and on this disk."""
    disk = {model.id: model for model in cached}
    hits = {repo.id: repo for repo in found}
    named = choices.text if choices.names_one else ""
    words = choices.words
    groups = Groups()
    demo = Entry(DEMO)
    if all(word in DEMO for word in words):
        groups.known.append(demo)
    if named:
        groups.typed.append(Entry(named))
    for preset in presets:
        if preset.id.lower() == named.lower():
            groups.typed = [Entry(preset.id, preset)]
        elif all(word in f"{preset.id} {preset.title}".lower() for word in words):
            groups.known.append(Entry(preset.id, preset))
    seen = {entry.id for _, entry in groups.all()}
    groups.found = [Entry(name) for name in hits if name not in seen and not named]
    seen |= {entry.id for entry in groups.found}
    fitting = [name for name in disk if all(word in name.lower() for word in words)]
    groups.here = [Entry(name) for name in fitting if name not in seen]
    for _, entry in groups.all():
        entry.cached, entry.found = disk.get(entry.id), hits.get(entry.id)
    return groups


def row_view(group: str, entry: Entry, choices: LoadChoices, machine: Machine) -> dict[str, Any]:
    """Everything that one row shows before any click."""
    context = choices.context or machine.context
    needed = estimates(entry.report, entry.preset, context, machine.target)
    memory = cells(needed, machine, choices.precision)
    cached = entry.cached if entry.id not in machine.in_use else None
    return {
        "id": entry.id,
        "group": group,
        "title": _title(entry),
        "note": entry.preset.notes if entry.preset else "",
        "facts": list(_facts(entry, choices)),
        "download": _download(entry, machine),
        "is_here": entry.is_here,
        "memory": memory,
        "warning": warning(memory, choices.precision),
        "problem": _problem(group, entry),
        "is_refused": _is_refused(entry),
        "remedy": entry.detail.link if entry.detail else "",
        "page": _page(entry),
        "is_loaded": entry.id == machine.loaded,
        "delete": f"Delete {gb(cached.bytes)}" if cached else "",
        "deletion": _deletion(cached) if cached else "",
    }


def _title(entry: Entry) -> str:
    if entry.id == DEMO:
        return "Demo, ships with medusa-chat"
    return entry.preset.title if entry.preset else ""


def _facts(entry: Entry, choices: LoadChoices) -> Iterator[list[str]]:
    """[label, text] each; what nobody said is left out."""
    base = _base(entry, choices)
    if entry.is_whole:
        yield ["base", "its own"]
    elif base and base != entry.id:
        yield ["base", base]
    yield from _of_heads(entry)
    licence = entry.preset.licence if entry.preset else entry.detail and entry.detail.licence
    if licence:
        yield ["licence", licence]
    gated = _gated(entry)
    if gated:
        yield ["gated", gated]
    if entry.found is not None and entry.found.downloads:
        yield ["downloads", f"{entry.found.downloads:,}"]


def _of_heads(entry: Entry) -> Iterator[list[str]]:
    heads = entry.report.heads if entry.report else None
    if heads is not None:
        yield ["heads", str(heads.heads)]
        yield ["layout", heads.words]
    elif entry.report is not None and entry.report.backbone and not entry.preset:
        yield ["heads", "none: prompt-lookup"]
    elif entry.preset is not None:
        yield ["heads", str(entry.preset.heads or "?")]
        yield ["layout", entry.preset.layout]


def _base(entry: Entry, choices: LoadChoices) -> str | None:
    needs = entry.detail.needs if entry.detail else None
    known = entry.preset.base if entry.preset else None
    found = entry.report.backbone if entry.report else None
    return choices.backbone or found or (needs.base if needs else None) or known


def _gated(entry: Entry) -> str:
    """Whether a licence must be accepted first; empty where nobody said."""
    needs = entry.detail.needs if entry.detail else None
    if entry.detail is not None and entry.detail.kind == "gated":
        return CLOSED
    if needs is not None:
        return "yes, and open to you" if needs.gated else "no"
    if entry.preset is not None and entry.preset.gated is not None:
        return "yes" if entry.preset.gated else "no"
    return "yes" if entry.found is not None and entry.found.gated else ""


def _download(entry: Entry, machine: Machine) -> str:
    """The bytes left to download; cached files are not counted."""
    left = 0 if entry.is_here else entry.detail.left if entry.detail else None
    if left is not None:
        return f"{gb(left)} to download" if left else "nothing to download"
    if entry.preset is not None and entry.preset.bytes:
        both = entry.preset.bytes + (entry.preset.base_bytes or 0)
        return f"about {gb(both)} to download"
    if is_folder(entry.id):
        return ""
    return "looking …" if entry.detail is None and machine.is_online else "size not known"


def _problem(group: str, entry: Entry) -> str:
    """Why it cannot be loaded. That the Hub cannot be asked is said once, above all rows."""
    if entry.detail is None or (entry.detail.kind in NOT_ASKED and group != "typed"):
        return ""
    return for_page(entry.detail.error)


def _is_refused(entry: Entry) -> bool:
    """Whether loading it would be refused for what it is: another try needs another checkpoint,
    or a change of its files."""
    detail = entry.detail
    return bool(detail and detail.error) and detail.kind not in (*NOT_ASKED, "gated", "refused")


def _page(entry: Entry) -> str:
    """Its page on the Hub."""
    is_there = entry.id != DEMO and is_repo_id(entry.id) and not is_folder(entry.id)
    return page(entry.id) if is_there else ""


def _deletion(cached: CachedModel) -> str:
    base = "" if cached.has_heads or not cached.whole else " Heads may need it as their base."
    half = "" if cached.whole else " The download is incomplete; loading it continues the download."
    return f"Delete {cached.id} from this disk? It frees {gb(cached.bytes)}.{base}{half}"
