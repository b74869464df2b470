"""KnownChecks: what the checks of a model found at an earlier load, so that each pays once."""

import json
import math
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import torch

from medusa_chat import __version__, paths
from medusa_chat.checkpoints import kept_copies, native_build
from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.layouts.lora import CONFIG
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.backends.parity import agrees

FOLDER = "checks"  # in the cache
PACKAGES = ("torch", "transformers")
PASS = "pass in C"


class KnownChecks:
    """Differences that were within their limits, cached in a file that is named by all that they
    depend on: the model's files, its precision and context, the device, our C library as it was
    compiled, and the versions of the packages. Nothing of a check that failed is kept."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, precision: str, device: torch.device, context: int
    ) -> "KnownChecks":
        """Those of a checkpoint, as it is loaded now. Raises OSError."""
        files = [checkpoint.backbone / name for name in checkpoint.weights.files]
        files += [] if checkpoint.weights.stored else [checkpoint.backbone / "config.json"]
        if checkpoint.adapter is not None:
            files += [checkpoint.adapter, checkpoint.adapter.with_name(CONFIG)]
        versions = __version__, *map(metadata.version, PACKAGES)
        built = native_build.identity() if device.type == "cpu" else ""
        facts = [*versions, precision, describe_device(device), context, built]
        return cls(paths.cache_dir() / FOLDER / f"{kept_copies.digest(facts, files)}.json")

    def found(self, what: str) -> float | None:
        """The difference that a check found; None where it has to be made."""
        value = self._all().get(what)
        return value if isinstance(value, float) and math.isfinite(value) else None

    def keep(self, what: str, difference: float) -> str:
        """Cache a difference -> a sentence on why that failed, or an empty string."""
        try:
            paths.write_text(self.file, json.dumps(self._all() | {what: difference}))
        except OSError as error:
            return (
                f"this model is checked again at each load: the result cannot be written to "
                f"{self.file.parent} ({error.strerror})"
            )
        return ""

    def agrees(self, instead: str, difference: Callable[[], float], tolerance: float) -> bool:
        """parity.agrees for the pass in C, which is compared once."""
        if self.found(PASS) is not None:
            return True
        measured: list[float] = []

        def measure() -> float:
            measured.append(difference())
            return measured[0]

        if not agrees(instead, measure, tolerance):
            return False
        self.keep(PASS, measured[0])
        return True

    def _all(self) -> dict[str, object]:
        try:
            read = json.loads(self.file.read_text("utf-8"))
        except (OSError, ValueError):
            return {}
        return read if isinstance(read, dict) else {}
