"""Shipped heads: matches the heads in this package to backbones, by name and shape."""

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
from medusa_chat.gguf_files import is_gguf, local_files, split_name
from medusa_chat.hub.catalog import ModelPreset, model_presets, shape
from medusa_chat.units import gb

# What names of files and repos append to the model's name about how its weights are stored.
STORED = r"([-._](gguf|ud|i1|imat(rix)?|[it]?q\d\w*|mxfp4\w*|(b?f|fp)(16|32)|\d{5}-of-\d{5}))*"
FREE = ("max_position_embeddings", "tie_word_embeddings")  # parts of a shape that files may change
OUT_OF_REACH = ("offline", "network", "busy")  # kinds of HubError


@dataclass(frozen=True)
class ShippedHeads:
    """Heads that ship with medusa-chat."""

    name: str
    folder: Path
    heads: HeadsFile
    note: str


def shipped_heads(
    name: str, config: Mapping[str, Any], place: Path | None = None
) -> ShippedHeads | None:
    """The shipped heads that fit a backbone without heads of its own; None where none fit.

    name: as given: a Hub id, a folder, a GGUF file. config: the backbone's; place: its folder or
    GGUF file, if it is on this disk. Raises ModelError for broken heads.
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
                f"using the heads that ship with medusa-chat ({preset.id}): the model's name and "
                f"shapes are those of {preset.base}"
            )
            return ShippedHeads(preset.id, folder, heads, note)
    return None


def are_shipped(folder: Path) -> bool:
    """Whether the heads in this folder ship with medusa-chat, for a base on the Hub."""
    return any(shipped_folder(preset.id) == folder for preset in _shipping())


def is_of(preset: ModelPreset, name: str) -> bool:
    """Whether a repo, folder or GGUF file has the name of these heads' base, with at most a suffix
    on how its weights are stored."""
    base = split_name(preset.base or "")[0].rpartition("/")[2]
    model = re.escape(re.sub("-gguf$", "", base, flags=re.IGNORECASE))
    last = re.split(r"[/\\]", name.removesuffix("/"))[-1]
    return re.fullmatch(f"{model}{STORED}", last, re.IGNORECASE) is not None


def local_backbone(preset: ModelPreset) -> str | None:
    """A GGUF file of its base in another program's folder; no file is opened."""
    return next((file.path for file in local_files() if is_of(preset, file.path)), None)


@contextmanager
def explaining_backbone(preset: ModelPreset | None) -> Iterator[None]:
    """Add a remedy to the error where the backbone of shipped heads cannot be reached. preset: the
    checkpoint's."""
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
    """The names of a backbone: as given, of its folder or file (also the folder of a GGUF file that
    was found in it), and of its repo if it is in the Hub's cache."""
    yield name
    if place is not None:
        where = place.absolute()
        yield where.name
        if is_gguf(where.name) and not is_gguf(name):
            yield where.parent.name
        yield from (p.split("--")[-1] for p in where.parts if p.startswith("models--"))
