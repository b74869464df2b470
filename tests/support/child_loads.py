"""The demo loaded in a process of its own, with an environment of its own."""

import multiprocessing
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from medusa_chat.checkpoints.load import load
from medusa_chat.messages import LoadRequest
from support.warm_workers import warm_context


@dataclass(frozen=True)
class Said:
    """What a process wrote."""

    stdout: str
    stderr: str


def load_demo(folder: Path, **environment: str) -> Said:
    """Load the demo in a warm process that has `environment` beside ours; stdout is what the load
    notes. folder: where both streams are kept meanwhile."""
    files = [folder / name for name in ("stdout", "stderr")]
    context = warm_context() or multiprocessing.get_context("spawn")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        child = context.Process(target=_print_notes, args=tuple(files))
        child.start()
    child.join(300)
    said = Said(*(file.read_text("utf-8") for file in files))
    assert child.exitcode == 0, said.stderr
    return said


def _print_notes(stdout: Path, stderr: Path) -> None:
    for number, file in enumerate((stdout, stderr), start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    *_, (_, loaded) = load(LoadRequest())
    assert loaded is not None
    print(" ".join(loaded.info.notes))
