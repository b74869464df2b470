"""Lines of the command line, each in a process of its own with an environment of its own."""

import multiprocessing
import os
import sys
from pathlib import Path

import pytest

from medusa_chat.cli.main import main
from support.warm_workers import warm_context


def run_together(folder: Path, line: list[str], environments: list[dict[str, str]]) -> list[str]:
    """What a line says on stdout in warm processes that run at a time; each has one of the
    `environments` beside ours. folder: where stdout is kept meanwhile."""
    context = warm_context() or multiprocessing.get_context("spawn")
    files = [folder / f"stdout-{number}" for number in range(len(environments))]
    children = []
    for environment, file in zip(environments, files, strict=True):
        with pytest.MonkeyPatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            children.append(context.Process(target=_run, args=(line, file), daemon=True))
            children[-1].start()
    for child in children:
        child.join(600)
    assert [child.exitcode for child in children] == [0] * len(children)
    return [file.read_text("utf-8") for file in files]


def _run(line: list[str], stdout: Path) -> None:
    os.dup2(os.open(stdout, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 1)
    sys.exit(main(line))
