"""Shipped heads: the backbones that the heads in this package belong to, by name and shape."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.contents import survey
from medusa_chat.checkpoints.layouts.heads_file import HeadsFile
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.places import shipped_folder
from medusa_chat.gguf_files import is_gguf, local_files
from medusa_chat.hub.catalog import ModelPreset, model_presets, shape
from medusa_chat.units import gb

# What names of files and repos say of how weights are stored, after the name of the model.
STORED = r"([-._](gguf|ud|i1|imat(rix)?|[it]?q\d\w*|mxfp4\w*|(b?f|fp)(16|32)|\d{5}-of-\d{5}))*"
FREE = (
    "max_position_embeddings",
    "tie_word_embeddings",
)  # of a shape: what files may say otherwise
OUT_OF_REACH = ("offline", "network", "busy")  # kinds of HubError


@dataclass(frozen=True)
class ShippedHeads:
    """Heads that come with medusa-chat. name: what they are called; folder: where they lie."""

    name: str
    folder: Path
    heads: HeadsFile
    note: str


def shipped_heads(
    name: str, config: Mapping[str, Any], place: Path | None = None
) -> ShippedHeads | None:
    """The heads for a backbone that was named without any, None where none fit.

    name: as it was given: a Hub id, a folder, a GGUF file. config: the backbone's; place: its
    folder or GGUF file, where that is on this disk. Raises ModelError for heads that are broken.
    """
    for preset in _shipping():
        folder = shipped_folder(preset.id)
        if folder is None or not folder.is_dir() or not _has_shape(config, preset):
            continue
        if not any(is_of(preset, one) for one in _names(name, place)):
            continue
        heads = survey(LocalFolder(folder)).heads
        if heads is not None:
            note = (
                f"the heads that come with medusa-chat ({preset.id}) are used: the name and the "
                f"shapes are those of {preset.base}"
            )
            return ShippedHeads(preset.id, folder, heads, note)
    return None


def are_shipped(folder: Path) -> bool:
    """Whether heads that lie in this folder came with medusa-chat, for a base on the Hub."""
    return any(shipped_folder(preset.id) == folder for preset in _shipping())


def is_of(preset: ModelPreset, name: str) -> bool:
    """Whether a repo, a folder or a GGUF file is called as the base of these heads, and at most
    adds how its weights are stored."""
    model = re.escape((preset.base or "").rpartition("/")[2])
    last = re.split(r"[/\\]", name.removesuffix("/"))[-1]
    return re.fullmatch(f"{model}{STORED}", last, re.IGNORECASE) is not None


def local_backbone(preset: ModelPreset) -> str | None:
    """A GGUF file of its base that another program keeps on this disk; no file is opened."""
    return next((file.path for file in local_files() if is_of(preset, file.path)), None)


@contextmanager
def explaining_backbone(preset: ModelPreset | None) -> Iterator[None]:
    """Say what to do where the backbone of heads that ship is out of reach. preset: of a
    checkpoint."""
    try:
        yield
    except hub.HubError as error:
        if preset is None or not preset.ships or error.kind not in OUT_OF_REACH:
            raise
        size = f" ({gb(preset.base_bytes)})" if preset.base_bytes else ""
        raise hub.HubError(
            f"{preset.id} needs {preset.base}{size}, which is not on this disk: fetch it with "
            f"medusa-chat models pull {preset.id} where there is a network, or give --backbone "
            f"{local_backbone(preset) or 'FILE.gguf'}",
            error.kind,
        ) from error


def _shipping() -> Iterator[ModelPreset]:
    return (preset for preset in model_presets() if preset.ships)


def _has_shape(config: Mapping[str, Any], preset: ModelPreset) -> bool:
    known = shape(preset.shape or "")
    return all(config.get(key) == value for key, value in known.items() if key not in FREE)


def _names(name: str, place: Path | None) -> Iterator[str]:
    """What a backbone is called: as it was given, by its place (a file that was found in a folder
    by that too), by its repo where that is in the Hub's cache."""
    yield name
    if place is not None:
        where = place.absolute()
        yield where.name
        if is_gguf(where.name) and not is_gguf(name):
            yield where.parent.name
        yield from (p.split("--")[-1] for p in where.parts if p.startswith("models--"))
