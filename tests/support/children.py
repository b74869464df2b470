"""The command line, or a load of the demo, in warm processes with an environment of their own."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from medusa_chat.checkpoints.load import load
from medusa_chat.cli.main import main
from medusa_chat.messages import LoadRequest
from support.warm_workers import warm_context


@dataclass(frozen=True)
class Said:
    """What a process wrote."""

    stdout: str
    stderr: str


def run_together(folder: Path, line: list[str], environments: list[dict[str, str]]) -> list[str]:
    """What a line says on stdout in processes that run at a time; each has one of the
    `environments` beside ours. folder: where their streams are kept meanwhile."""
    return [said.stdout for said in _said(folder, environments, _run, line)]


def load_demo(folder: Path, **environment: str) -> Said:
    """Load the demo with `environment` beside ours; stdout is what the load notes."""
    return _said(folder, [environment], _print_notes)[0]


def _said(
    folder: Path, environments: Sequence[Mapping[str, str]], work: Callable[..., None], *given: Any
) -> list[Said]:
    context = warm_context() or multiprocessing.get_context("spawn")
    children = []
    for number, environment in enumerate(environments):
        files = [folder / f"{name}-{number}" for name in ("stdout", "stderr")]
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            child = context.Process(target=_apart, args=(files, work, *given), daemon=True)
            child.start()
        children.append((child, files))
    found = []
    for child, files in children:
        child.join(600)
        found.append(Said(*(file.read_text("utf-8") for file in files)))
        assert child.exitcode == 0, found[-1].stderr
    return found


def _apart(files: Sequence[Path], work: Callable[..., None], *given: Any) -> None:
    for number, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    work(*given)


def _run(line: list[str]) -> None:
    sys.exit(main(line))


def _print_notes() -> None:
    *_, (_, loaded) = load(LoadRequest())
    assert loaded is not None
    print(" ".join(loaded.info.notes))
