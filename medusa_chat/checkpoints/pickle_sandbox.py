"""The pickle sandbox: files that torch.save wrote become safetensors before anything uses them.

Such a file is a pickle, a program that may do anything. Three walls stand before it: its list of
tensors is worked out without running it (layouts/pickles.py); torch reads it with weights_only in
a child process with limits (pickle_sandbox_child.py), where it must hold what the list says; and
only the safetensors file that the child wrote and read again is ever loaded here. It is kept in the
cache under the hash of the content.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.layouts.entry import Entry
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.process_limits import environment
from medusa_chat.errors import ModelError
from medusa_chat.units import gb

KIND = "converted"
MAX_BYTES = 1 << 36  # 64 GiB a file
SPEED = 20e6  # bytes a second that the slowest disk converts
STARTUP = 120  # seconds for the child to import torch on a busy machine
REMEDY = "fetch it again, or use a .safetensors file"
INDEX = "model.safetensors.index.json"
DIED = "the process that read it {}: it is broken or malicious"


@dataclass(frozen=True)
class Job:
    """Files that one folder is made of: (source, target, tensor -> [dtype, shape])."""

    files: tuple[tuple[Path, Path, dict[str, list[Any]]], ...]
    finite: bool

    @property
    def bytes(self) -> int:
        return max(source.stat().st_size for source, _, _ in self.files)

    @property
    def seconds(self) -> float:
        return sum(source.stat().st_size for source, _, _ in self.files) / SPEED + 1

    def line(self) -> str:
        """What the child reads."""
        files = [[str(source), str(target), header] for source, target, header in self.files]
        values = {"files": files, "finite": self.finite}
        return json.dumps(values | {"bytes": self.bytes, "seconds": self.seconds})


def convert(files: Sequence[Path], finite: bool) -> Path:
    """The folder that holds the tensors of `files` as safetensors, made now or earlier.

    finite: refuse NaN and infinity. The names are those of `target_names`. Raises ModelError.
    """
    headers = [checked_header(file) for file in files]
    folder = kept_copies.root(KIND) / _content_key(files)
    if folder.is_dir():
        return folder
    try:
        _convert_into(folder, files, headers, finite)
    except OSError as error:
        raise ModelError(
            f"{files[0]} cannot be converted ({error.strerror or error}): free disk space in "
            f"{folder.parent}, or set --data-dir"
        ) from error
    return folder


def _convert_into(
    folder: Path, files: Sequence[Path], headers: Sequence[dict[str, Entry]], finite: bool
) -> None:
    size = sum(file.stat().st_size for file in files)
    if not kept_copies.has_room(folder, size):
        raise ModelError(
            f"{files[0]} takes {gb(size)} in {folder.parent} once converted, and its disk is full: "
            "free some (medusa-chat models rm), or set --data-dir"
        )
    origin = kept_copies.Origin(_name_of(files[0]), str(files[0]), "safetensors")
    with kept_copies.writing(folder, origin) as partial:
        names = target_names(files)
        parts = zip(files, names, headers, strict=True)
        job = Job(tuple((f, partial / name, plain(h)) for f, name, h in parts), finite)
        problem = run(job)
        if problem is not None:
            raise ModelError(f"{' and '.join(map(str, files))} is refused: {problem}; {REMEDY}")
        if len(files) > 1:
            table = {n: name for name, h in zip(names, headers, strict=True) for n in h}
            paths.write_text(partial / INDEX, json.dumps({"metadata": {}, "weight_map": table}))


def _name_of(file: Path) -> str:
    """What a user calls the place of a file: the repo in whose cache it lies, else its folder."""
    cached = next((part for part in file.parts if part.startswith("models--")), None)
    if cached is None:
        return str(file.parent.resolve())
    return cached.removeprefix("models--").replace("--", "/")


def target_names(files: Sequence[Path]) -> list[str]:
    """Names of the converted files in their folder, as transformers looks for them."""
    return ["model.safetensors"] if len(files) == 1 else [f"{f.stem}.safetensors" for f in files]


def checked_header(file: Path) -> dict[str, Entry]:
    """The first wall: size, zip archive, and a pickle that only lists tensors. No torch."""
    header = read_header(LocalFolder(file.parent), file.name)
    if file.stat().st_size > MAX_BYTES:
        raise ModelError(f"{file} is larger than {gb(MAX_BYTES)}: use .safetensors shards")
    return header


def plain(header: dict[str, Entry]) -> dict[str, list[Any]]:
    """A header as the child compares it."""
    return {name: [entry.dtype, list(entry.shape)] for name, entry in header.items()}


def run(job: Job) -> str | None:
    """Why a child process refuses the job's files; None when it converted them."""
    command = [sys.executable, "-P", "-m", "medusa_chat.checkpoints.pickle_sandbox_child"]
    try:
        child = subprocess.run(
            command,
            input=job.line(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            text=True,
            encoding="utf-8",
            timeout=STARTUP + job.seconds,
        )
    except subprocess.TimeoutExpired:
        return DIED.format("took too long")
    answers = [line for line in child.stdout.splitlines() if line.startswith('{"problem"')]
    if not answers:
        return DIED.format(f"ended with code {child.returncode}")
    problem: str | None = json.loads(answers[0])["problem"]
    return problem


def _content_key(files: Sequence[Path]) -> str:
    """SHA-256 over the content; remembered by path, size and time of change, for it is slow."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(_hash(file).encode())
    return digest.hexdigest()[:40]


def _hash(file: Path) -> str:
    real, stat = file.resolve(), file.stat()
    mark = os.fsencode(real) + f"|{stat.st_size}|{stat.st_mtime_ns}".encode()
    stamp = hashlib.sha256(mark).hexdigest()[:40]
    known = kept_copies.root(KIND) / "known" / stamp
    if known.is_file():
        return known.read_text("utf-8")
    with open(file, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        paths.write_text(known, found)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return found
