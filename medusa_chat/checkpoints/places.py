"""Places: resolves the name of a checkpoint to a folder, a GGUF file or a Hub repo."""

import os
import re
from pathlib import Path

from medusa_chat import hub
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import first_part, is_gguf, split_name
from medusa_chat.hub.catalog import model_preset, model_presets
from medusa_chat.paths import asset

PATH = re.compile(r"[./~]|[A-Za-z]:/|.*\\")  # how a path begins, and no Hub id does


def open_here(name: str) -> LocalFolder:
    """The files of a shipped checkpoint, a folder, a cached Hub repo or a GGUF file. Raises
    ModelError; the network is never used."""
    place = place_of(name)
    return opened(place) if is_gguf_file(place) else LocalFolder(place, name)


def folder_or_repo(name: str) -> Path | str:
    """The folder or GGUF file that a checkpoint's or backbone's name means, otherwise the name as a
    Hub id, with or without a GGUF file; a split file is named by its first part. Raises ModelError
    for a name that can be none of these."""
    shipped = shipped_folder(name)
    if shipped is not None:
        if not (shipped / "config.json").is_file():
            raise ModelError(
                f"the checkpoint {name} is missing from {shipped}: install medusa-chat again"
            )
        return shipped
    path = _path(name)
    if name and is_gguf_file(path):
        first = path.with_name(first_part(path.name))
        return first if is_gguf_file(first) else path
    if name and is_folder(path):
        return _snapshot(path) or path
    is_id = split_name(name)[0].count("/") == 1 and not PATH.match(name)
    if not name.isprintable() or not is_id or is_here(name):  # a file's name is not sent out
        raise ModelError(_no_such(name))
    return first_part(name)


def _snapshot(folder: Path) -> Path | None:
    """For a repo's folder in the Hub's cache its snapshot of main, otherwise its newest complete
    one; None for any other folder."""
    if not folder.name.startswith("models--"):
        return None
    ref = folder / "refs" / "main"
    commit = ref.read_text("utf-8", "replace").strip()[:100] if ref.is_file() else ""
    main = folder / "snapshots" / Path(commit).name
    return main if commit and is_folder(main) else hub.newest_snapshot(folder)


def shipped_folder(name: str) -> Path | None:
    """The folder of what ships under this name: the demo, or heads for a base on the Hub. None for
    other names; the folder may not exist."""
    if name == "demo":
        return asset("demo")
    preset = model_preset(name)
    return asset(preset.ships) if preset and preset.ships else None


def is_here(name: str) -> bool:
    """Whether a name means something on this disk: a shipped checkpoint, a folder, a file, or a
    missing GGUF file in a folder that exists."""
    path = _path(name)
    is_place = is_folder(path) or (name.isprintable() and os.path.isfile(path))
    is_named = is_gguf(name) and is_folder(path.parent)
    return shipped_folder(name) is not None or is_place or is_named


def on_disk(name: str) -> str:
    """The whole path of what a name means on this disk; shipped names and Hub ids as they are."""
    is_path = name and name.isprintable() and shipped_folder(name) is None
    return os.path.abspath(_path(name)) if is_path and os.path.exists(_path(name)) else name


def _path(name: str) -> Path:
    """The name as a path; ~ is kept where there is no such user."""
    path = Path(name or "/")
    try:
        return path.expanduser()
    except RuntimeError:
        return path


def _no_such(name: str) -> str:
    path = _path(name)
    if name.isprintable() and os.path.isfile(path):
        return f"{name} is a file: give the folder of the checkpoint, or a GGUF file"
    if name.isprintable() and (PATH.match(name) or is_gguf(name)):
        return f"there is no {'file' if is_gguf(name) else 'folder'} {name}: check the path"
    shipped = " or ".join([*(p.id for p in model_presets() if p.ships), "demo"])
    return (
        f"{name[:80]!r} is not a checkpoint: give a folder, a GGUF file, a Hub id (owner/name), "
        f"{shipped}"
    )


def place_of(name: str) -> Path:
    """The folder or GGUF file that a name means, for a Hub id in the cache. Raises ModelError."""
    place = folder_or_repo(name)
    return place if isinstance(place, Path) else from_hub(place)


def opened(place: Path) -> LocalFolder:
    """The files of a folder, or only the GGUF file."""
    only = place.name if is_gguf_file(place) else None
    return LocalFolder(folder_of(place), only=only)


def folder_of(place: Path) -> Path:
    return place.parent if is_gguf_file(place) else place


def is_gguf_file(path: Path) -> bool:
    """Whether it exists and is named like a GGUF file; its content is checked when it is read."""
    try:
        return is_gguf(path.name) and path.exists() and not path.is_dir()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Path.is_dir, and False for a name that no folder can have (null bytes, too long)."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def from_hub(name: str) -> Path:
    """The cached Hub repo, or its GGUF file. Raises HubError where it is not cached."""
    folder, file = hub.resolve(name), split_name(name)[1]
    return folder / file if file else folder
