"""Quantised backbones: what was quantised once is kept, and loaded again without its source.

A folder of ours in the cache for each source and precision, written whole or not at all, as
transformers saves it. The source's files are told by place, size and time of change.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from medusa_chat import __version__, paths
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.errors import first_line

ABOUT = "about.json"
FORMAT = 1
MARGIN = 64 << 20
STALE_SECONDS = 86400


@dataclass(frozen=True)
class QuantisedCopy:
    """A backbone on this disk. name: the checkpoint it was loaded for; source: its folder."""

    name: str
    source: str
    precision: str
    bytes: int
    folder: Path


def find(found: Checkpoint, precision: str, dtype: str) -> Path | None:
    """The folder with this backbone quantised, None where it was not or has changed since. dtype:
    of what stays in 16 bits. No file of the source is opened."""
    folder = _folder(found, precision, dtype)
    return folder if (folder / ABOUT).is_file() else None


def keep(model: Any, found: Checkpoint, precision: str, dtype: str, size: int) -> str:
    """Save a quantised backbone of `size` bytes as it was loaded; a sentence that says so, or why
    it is not kept: a cache that cannot be written only costs time."""
    from safetensors import SafetensorError

    folder = _folder(found, precision, dtype)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder.parent).free < size + MARGIN:
            return f"the {precision} weights are not kept: the disk of {folder.parent} is full"
        _save(model, folder, {"name": found.name, **_origin(found, precision)})
    except (OSError, SafetensorError) as error:
        return f"the {precision} weights are not kept in {folder.parent}: {first_line(error)}"
    return f"the {precision} weights are kept for the next load (medusa-chat models list)"


def drop(folder: Path) -> None:
    """Remove one that cannot be read."""
    shutil.rmtree(folder, ignore_errors=True)


def kept() -> tuple[QuantisedCopy, ...]:
    """Every one that is on this disk."""
    return tuple(_all())


def remove(name: str) -> int:
    """Delete those that were loaded for the checkpoint `name`; the bytes freed."""
    chosen = [one for one in _all() if one.name == name]
    for one in chosen:
        shutil.rmtree(one.folder, ignore_errors=True)
    return sum(one.bytes for one in chosen)


def _all() -> Iterator[QuantisedCopy]:
    try:
        folders = sorted(f for f in _root().iterdir() if not f.name.startswith("."))
    except OSError:
        return
    for folder in folders:
        try:
            about = json.loads((folder / ABOUT).read_text("utf-8"))
            sizes = [file.stat().st_size for file in folder.iterdir()]
            words = [str(about[key]) for key in ("name", "source", "precision")]
        except (OSError, ValueError, KeyError, TypeError):
            continue  # one that is being written
        yield QuantisedCopy(*words, sum(sizes), folder)


def _root() -> Path:
    return paths.cache_dir() / "quantised"


def _folder(found: Checkpoint, precision: str, dtype: str) -> Path:
    """Named by all that its content depends on."""
    facts: list[Any] = [FORMAT, precision, dtype, metadata.version("bitsandbytes")]
    for name in ("config.json", *found.weights.files):
        file = found.backbone / name
        stat = file.stat()
        facts.append([str(file.resolve()), stat.st_size, stat.st_mtime_ns])
    return _root() / hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]


def _origin(found: Checkpoint, precision: str) -> dict[str, str]:
    return {"source": str(found.backbone.resolve()), "precision": precision}


def _save(model: Any, folder: Path, about: dict[str, str]) -> None:
    paths.drop_leftovers(folder.parent, ".part-*", STALE_SECONDS)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".part-"))
    try:
        model.save_pretrained(partial, max_shard_size="4GB")
        for file in partial.iterdir():
            with open(file, "rb+") as stream:
                os.fsync(stream.fileno())
        paths.write_text(partial / ABOUT, json.dumps(about | {"version": __version__}))
        for old in _all():  # of the same source as it was before
            if (old.source, old.precision) == (about["source"], about["precision"]):
                drop(old.folder)
        if not folder.is_dir():  # another process may have made it meanwhile
            os.replace(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
