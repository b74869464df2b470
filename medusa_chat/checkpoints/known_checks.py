"""Known checks: what was found of a model's plain steps before, so that no load pays for it twice.

A file for each model as it is loaded: by its files, its precision, and what decodes it here.
"""

import json
import math
from importlib import metadata
from pathlib import Path

from medusa_chat import __version__, paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.layouts.lora import CONFIG
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.step import StepBackend

FOLDER = "checks"  # of the cache
PACKAGES = ("torch", "transformers")


def place(found: Checkpoint, precision: str, backend: StepBackend) -> Path:
    """The file of this model's check; it need not exist."""
    backbone = backend.backbone
    files = [found.backbone / name for name in ("config.json", *found.weights.files)]
    if found.adapter is not None:
        files += [found.adapter, found.adapter.with_name(CONFIG)]
    facts = [
        *(__version__, *map(metadata.version, PACKAGES)),
        *(precision, str(backbone.dtype), describe_device(backbone.device)),
        *(type(backend).__name__, backbone.implementation, backbone.context),
    ]
    return paths.cache_dir() / FOLDER / f"{kept_copies.digest(facts, files)}.json"


def read(file: Path) -> float | None:
    """The difference that was found before; None where nothing is known."""
    try:
        value = json.loads(file.read_text("utf-8"))["difference"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return value if isinstance(value, float) and math.isfinite(value) else None


def write(file: Path, difference: float) -> str:
    """Keep a difference; why that cannot be done, in a sentence, or nothing."""
    try:
        paths.write_text(file, json.dumps({"difference": difference}))
    except OSError as error:
        return f"the check of this model is made at each load: {file.parent}: {error.strerror}"
    return ""
