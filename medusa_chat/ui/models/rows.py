"""Rows: what is shown of each checkpoint, with its figures before any click. No gradio."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints.kept_copies import OLD
from medusa_chat.checkpoints.shipped_heads import local_backbone
from medusa_chat.hub import cached_folder, gb, is_offline, is_repo_id
from medusa_chat.hub.catalog import known_drafters, model_presets, repo_id_of, repo_of
from medusa_chat.hub.client import page
from medusa_chat.ui.models.checkpoint_lookup import NOT_ASKED
from medusa_chat.ui.models.entries import DEMO, Entry
from medusa_chat.ui.models.load_form import LoadChoices, is_local
from medusa_chat.ui.models.memory_fit import (
    Machine,
    cells,
    estimates,
    precision_taken,
    taken_line,
    warning,
)
from medusa_chat.ui.models.picker import for_page

TOY = "The demo is a toy: it shows how drafting works, and knows little."
AWAY = ": the network is off"
CLOSED = "yes, its licence is not accepted yet"


def row_view(group: str, entry: Entry, choices: LoadChoices, machine: Machine) -> dict[str, Any]:
    """Everything that one row shows before any click."""
    context = choices.context or machine.context
    needed = estimates(entry.report, entry.preset, context, machine.target)
    taken = precision_taken(needed, machine, choices.precision)
    memory = cells(needed, machine, taken)
    freed = 0 if entry.names & machine.in_use else _freed(entry)
    is_away = _is_away(entry, choices, machine)
    return {
        "id": entry.id,
        "group": group,
        "title": _title(entry),
        "note": entry.preset.notes if entry.preset else "",
        "facts": list(_facts(entry, choices, machine)),
        "download": _download(entry, choices, machine) + (AWAY if is_away else ""),
        "is_away": is_away,
        "is_here": entry.is_here,
        "memory": memory,
        "takes": taken_line(needed, taken, choices.precision, machine),
        "warning": warning(memory, choices.precision),
        "problem": _problem(group, entry),
        "is_refused": _is_refused(entry),
        "remedy": entry.detail.link if entry.detail else "",
        "page": _page(entry),
        "is_loaded": _is_loaded(entry, choices, machine),
        "ships": entry.ships,
        "delete": _delete(entry, freed) if freed else "",
        "deletion": _deletion(entry, freed) if freed else "",
    }


def offer() -> dict[str, str]:
    """What the empty Chat page says while the demo is loaded: the real model that stands first;
    nothing where it would have to be downloaded without a network."""
    preset = next(preset for preset in model_presets() if preset.ships)
    if is_offline() and not cached_folder(repo_of(preset.id)):
        if local_backbone(preset) is None:
            return {"id": "", "toy": TOY, "text": ""}
    model = preset.title.partition(":")[0]
    return {
        "id": preset.id,
        "toy": TOY,
        "text": f"Try {model}, small and real ({gb(preset.base_bytes or 0)})",
    }


def _title(entry: Entry) -> str:
    if entry.id == DEMO:
        return "Demo, ships with medusa-chat"
    if entry.local is not None:
        return Path(entry.id).name
    if entry.preset is not None and entry.ships:
        size = gb(entry.preset.base_bytes or 0)
        return f"{entry.preset.title}, {size}, heads ship with medusa-chat"
    return entry.preset.title if entry.preset else ""


def _facts(entry: Entry, choices: LoadChoices, machine: Machine) -> Iterator[list[str]]:
    """[label, text] each; what nobody said is left out."""
    base, loaded = _base(entry, choices), machine.loaded
    if loaded and loaded.checkpoint == entry.id and not _is_loaded(entry, choices, machine):
        yield [
            "loaded",
            f"on {Path(loaded.backbone).name}" if loaded.backbone else "on its backbone",
        ]
    if entry.is_whole:
        yield ["backbone", "its own"]
    elif base and base != entry.id:
        yield ["backbone", base]
    yield from _of_heads(entry)
    yield from _of_gguf(entry)
    if drafters := known_drafters(base or entry.id):
        words = ", ".join(f"{one.id} ({one.kind})" for one in drafters)
        yield ["drafters", f"{words}: start with --draft ID"]
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
    elif entry.report is not None and entry.report.backbone and not entry.preset:
        yield ["heads", "none: prompt-lookup"]
    elif entry.preset is not None:
        yield ["heads", str(entry.preset.heads or "?")]


def _of_gguf(entry: Entry) -> Iterator[list[str]]:
    """How its weights are stored, and what earlier versions made of it."""
    if entry.local is not None:
        yield ["of", entry.local.app]
    report = entry.report
    if report is None or not report.stored:
        return
    yield ["GGUF", f"{report.stored}, {gb(report.backbone_bytes)}"]
    if old := sum(one.bytes for one in entry.copies if one.kind == OLD):
        yield ["old copy", f"{gb(old)}, converted by an earlier version: no longer read"]
    yield from (["note", note] for note in report.notes if "GGUF file" in note)


def _base(entry: Entry, choices: LoadChoices) -> str | None:
    needs = entry.detail.needs if entry.detail else None
    known = entry.preset.base if entry.preset else None
    backbone = entry.report.backbone if entry.report else None
    return choices.backbone or backbone or (needs.base if needs else None) or known


def _gated(entry: Entry) -> str:
    """That a licence must be accepted first; empty where none must, or nobody said."""
    needs = entry.detail.needs if entry.detail else None
    if entry.detail is not None and entry.detail.kind == "gated":
        return CLOSED
    if needs is not None:
        return "yes, and open to you" if needs.gated else ""
    if entry.preset is not None and entry.preset.gated is not None:
        return "yes" if entry.preset.gated else ""
    return "yes" if entry.found is not None and entry.found.gated else ""


def _is_loaded(entry: Entry, choices: LoadChoices, machine: Machine) -> bool:
    """Whether it is loaded, on the backbone that it would be loaded with now."""
    loaded, base = machine.loaded, entry.preset.base if entry.preset else None
    if loaded is None or loaded.checkpoint != entry.id:
        return False
    wanted = entry.key(choices.backbone).backbone or base
    return entry.is_whole or wanted == (loaded.backbone or base)


def _download(entry: Entry, choices: LoadChoices, machine: Machine) -> str:
    """The bytes left to download; cached files are not counted, nor those of a model that is
    loaded, from wherever it came."""
    is_here = entry.is_here or _is_loaded(entry, choices, machine)
    left = 0 if is_here else entry.detail.left if entry.detail else None
    if left is not None:
        return f"{gb(left)} to download" if left else "nothing to download"
    if entry.preset is not None and entry.preset.download_bytes:
        return f"about {gb(entry.preset.download_bytes)} to download"
    if is_local(entry.id):
        return ""
    return "looking …" if entry.detail is None and machine.is_online else "size not known"


def _is_away(entry: Entry, choices: LoadChoices, machine: Machine) -> bool:
    """Whether loading it would download, and there is no network to be used."""
    if not machine.is_offline or entry.is_here or is_local(entry.id) or entry.beside:
        return False
    is_whole = entry.cached is not None and entry.cached.whole
    return not is_whole and not _is_loaded(entry, choices, machine)


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
    """Its page on the Hub; of heads that ship the backbone's."""
    is_there = entry.id != DEMO and is_repo_id(entry.id) and not is_local(entry.id)
    return page(repo_id_of(entry.id)) if is_there else ""


def _freed(entry: Entry) -> int:
    """The bytes that deleting it frees: of the repo, and of what was made of it here."""
    made = sum(one.bytes for one in entry.copies)
    return made + (entry.cached.bytes if entry.cached else 0)


def _delete(entry: Entry, freed: int) -> str:
    return f"Delete {'' if entry.cached else 'copy: '}{gb(freed)}"


def _deletion(entry: Entry, freed: int) -> str:
    cached = entry.cached
    if cached is None:
        return (
            f"Delete the copies made of {entry.id}? It frees {gb(freed)}; the model itself stays."
        )
    base = "" if cached.has_heads or not cached.whole else " Heads may need it as their backbone."
    half = "" if cached.whole else " The download is incomplete; loading it continues the download."
    return f"Delete {cached.id} from this disk? It frees {gb(freed)}.{base}{half}"
