"""The process of one part of gpu.py, which writes each figure as soon as it has it."""

import faulthandler
import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bench:
    """What every part gets. device: "cuda", or "cpu" in a dry run (`is_dry`), whose shapes are
    tiny. model: a folder, or None. known: what the parts before found, by their names."""

    device: str
    is_dry: bool = False
    model: str | None = None
    known: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def either(self, whole: Any, dry: Any) -> Any:
        """`whole` on a GPU and `dry` in a dry run."""
        return dry if self.is_dry else whole

    def figure(self, part: str, *names: str) -> float | None:
        """A number that a part before found; None where it did not."""
        found: Any = self.known.get(part, {})
        for name in names:
            found = found.get(name, {}) if isinstance(found, Mapping) else {}
        return found if isinstance(found, int | float) else None


def written(file: Path, value: Any) -> None:
    """Write JSON; whoever reads the file meanwhile finds the whole of it, or of the last one."""
    draft = file.with_name(f"{file.name}.part")
    draft.write_text(json.dumps(value, indent=1), "utf-8")
    os.replace(draft, file)


def run(asked: str, before: Path, into: Path) -> None:
    """Run a part, and write how it ended early (its own word for it), if it did, and its figures to
    `into`. asked: JSON of its call, of the fields of its Bench, of its options, and of the packages
    it needs. before: the file with what the parts before found."""
    call, fields, options, needs = json.loads(asked)
    if missing := [name for name in needs if find_spec(name) is None]:
        written(into, {"outcome": f"left out: {', '.join(missing)} is not installed"})
        return
    logging.basicConfig()
    logging.getLogger("medusa_chat").setLevel(logging.DEBUG)  # where what was refused came from
    bench = Bench(**fields, known=json.loads(before.read_text("utf-8")))
    module, _, function = call.partition(":")
    found: dict[str, Any] = {}
    try:
        for name, value in getattr(import_module(module), function)(bench, **options):
            found[name] = value
            written(into, {"found": found})
    except SystemExit as end:
        written(into, {"outcome": str(end.code), "found": found})


if __name__ == "__main__":
    faulthandler.enable()  # a signal that ends the process shows where it was
    sys.path.insert(0, str(Path(__file__).parents[2]))
    run(sys.argv[1], *map(Path, sys.argv[2:]))
