"""The command lines that README.md and the pages of docs/ show."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import typer

from medusa_chat.cli.main import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```[a-z]*\n(.*?)^```", re.M | re.S)
COMMANDS = typer.main.get_command(app)
SCRIPT = r"(?:medusa-chat\b|python (?:assets|tests)/|accelerate launch)"


def shown(text: str) -> Iterator[str]:
    """Every command line of a page, as it stands there, in one line: `medusa-chat ...`, our
    scripts, in code spans and in blocks. `bench --study NAME` stands without the program's name."""
    outside = FENCE.sub("", text)
    spans = re.findall(rf"`({SCRIPT}[^`]*)`", outside)
    short = "|".join(COMMANDS.commands)
    spans += [f"medusa-chat {s}" for s in re.findall(rf"`((?:{short}) --[^`]+)`", outside)]
    blocks = [line for block in FENCE.findall(text) for line in joined(block)]
    blocks += re.findall(rf"^ {{4}}({SCRIPT}.*)", outside, re.M)
    for line in [*spans, *blocks]:
        for part in re.split(r"&&|;", re.sub(r"\s# .*", "", line)):
            if re.match(SCRIPT, part.strip()):
                yield " ".join(part.split())


def joined(block: str) -> list[str]:
    """The lines of a block, those that begin further right joined to the one before."""
    return re.sub(r"\n {4,}", " ", block).splitlines()


def words(command: str) -> list[str]:
    """A command's words without its brackets, bars and ellipses, the program's name left out."""
    return shlex.split(re.sub(r"[\[\]|]|\.\.\.|\(see.*", " ", command))[1:]
