"""Pickle sandbox: converts files written by torch.save to safetensors before anything uses them.

Such a file is a pickle, a program that may do anything. First its list of tensors is read without
running it (layouts/pickles.py). Then torch reads it with weights_only in a child process with
limits (`main` here), where it must hold what the list says. Our own process loads only the
safetensors file that the child writes; it is cached under the hash of the content. The job goes to
the child as JSON on stdin, and its answer comes as a JSON line: {"problem": null or why the file is
refused}.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.layouts.headers import Entry, read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.process_limits import environment, limit_memory, lower_limit
from medusa_chat.errors import ModelError
from medusa_chat.units import gb

resource: ModuleType | None
try:
    import resource
except ImportError:  # Windows
    resource = None

KIND = "converted"
MAX_BYTES = 1 << 36  # 64 GiB a file
SPEED = 20e6  # bytes a second: the conversion on the slowest disk
STARTUP = 120  # seconds for the child to import torch on a busy machine
REMEDY = "download it again, or use a .safetensors file"
INDEX = "model.safetensors.index.json"
DIED = "the process that reads it {}: it is broken or malicious"
DTYPES = {
    **{torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
CHUNK = 1 << 22  # numbers written at once
SLACK = 1 << 30  # memory beyond the file's own size
GROWTH = 8  # tensors that share storage are written separately: at most this many times the file
Job = dict[str, Any]  # what the child is asked, as JSON


def convert(files: Sequence[Path]) -> Path:
    """The folder with the tensors of `files` as safetensors, made now or earlier, under the names
    of `target_names`. Raises ModelError."""
    headers = [checked_header(file) for file in files]
    folder = kept_copies.root(KIND) / _content_key(files)
    if folder.is_dir():
        return folder
    try:
        _convert_into(folder, files, headers)
    except OSError as error:
        raise ModelError(
            f"{files[0]} cannot be converted ({error.strerror or error}): free disk space in "
            f"{folder.parent}, or set --data-dir"
        ) from error
    return folder


def _convert_into(
    folder: Path, files: Sequence[Path], headers: Sequence[Mapping[str, Entry]]
) -> None:
    size = sum(file.stat().st_size for file in files)
    if not kept_copies.has_room(folder, size):
        raise ModelError(
            f"converting {files[0]} needs {gb(size)} in {folder.parent}, and the disk has too "
            "little free space: free some (medusa-chat models rm), or set --data-dir"
        )
    origin = kept_copies.Origin(_name_of(files[0]), str(files[0]), "safetensors")
    with kept_copies.writing(folder, origin) as partial:
        names = target_names(files)
        problem = run(job_of(files, [partial / name for name in names], headers))
        if problem is not None:
            raise ModelError(f"{' and '.join(map(str, files))} is refused: {problem}; {REMEDY}")
        if len(files) > 1:
            table = {n: name for name, h in zip(names, headers, strict=True) for n in h}
            paths.write_text(partial / INDEX, json.dumps({"metadata": {}, "weight_map": table}))


def _name_of(file: Path) -> str:
    """The checkpoint that a file belongs to: its Hub repo, otherwise its folder."""
    cached = next((part for part in file.parts if part.startswith("models--")), None)
    if cached is None:
        return str(file.parent.resolve())
    return cached.removeprefix("models--").replace("--", "/")


def target_names(files: Sequence[Path]) -> list[str]:
    """Names of the converted files in their folder, as transformers looks for them."""
    return ["model.safetensors"] if len(files) == 1 else [f"{f.stem}.safetensors" for f in files]


def checked_header(file: Path) -> dict[str, Entry]:
    """The tensors that a file lists; its pickle is not run. Raises ModelError."""
    header = read_header(LocalFolder(file.parent), file.name)
    size = file.stat().st_size
    if size > MAX_BYTES:
        raise ModelError(f"{file} is larger than {gb(MAX_BYTES)}: use .safetensors shards")
    if sum(entry.bytes for entry in header.values()) > GROWTH * size:
        raise ModelError(
            f"{file} is refused: its tensors share storage and would take more than {GROWTH} times "
            f"the file; {REMEDY}"
        )
    return header


def job_of(
    files: Sequence[Path], targets: Sequence[Path], headers: Sequence[Mapping[str, Entry]]
) -> Job:
    """The job: write each file's tensors, which must match its header, to its target."""
    sizes = [file.stat().st_size for file in files]
    plain = [{n: [e.dtype, list(e.shape)] for n, e in header.items()} for header in headers]
    return {
        "files": list(zip(map(str, files), map(str, targets), plain, strict=True)),
        "bytes": max(sizes),
        "seconds": sum(sizes) / SPEED + 1,
    }


def run(job: Job) -> str | None:
    """Why a child process refuses the job's files; None when it converted them."""
    command = [sys.executable, "-P", "-m", __name__]
    try:
        child = subprocess.run(
            command,
            input=json.dumps(job),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(),
            text=True,
            encoding="utf-8",
            timeout=STARTUP + job["seconds"],
        )
    except subprocess.TimeoutExpired:
        return DIED.format("took too long")
    answers = [line for line in child.stdout.splitlines() if line.startswith('{"problem"')]
    if not answers:
        return DIED.format(f"ended with code {child.returncode}")
    problem: str | None = json.loads(answers[0])["problem"]
    return problem


def _content_key(files: Sequence[Path]) -> str:
    """SHA-256 of the content; cached by path, size and modification time, since it takes long."""
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
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    try:
        paths.write_text(known, digest)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest


def main() -> None:
    """The child process: do the job and answer with the problem, if there is one."""
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    limit(job["bytes"], job["seconds"])
    print(json.dumps({"problem": problem_of(job)}), flush=True)


def limit(size: int, seconds: float) -> None:
    """Limit memory, processor time and file sizes. Windows has no such limits; there only the
    parent's timeout applies."""
    if resource is None:
        return
    limit_memory(2 * size + SLACK)
    lower_limit(resource.RLIMIT_CPU, int(seconds) + 60)
    lower_limit(resource.RLIMIT_FSIZE, GROWTH * size + SLACK)
    lower_limit(resource.RLIMIT_CORE, 0)


def problem_of(job: Job) -> str | None:
    """Convert the files of a job -> why one is refused, or None."""
    try:
        for source, target, header in job["files"]:
            tensors = torch.load(source, weights_only=True, map_location="cpu", mmap=True)
            if {n: [DTYPES.get(t.dtype), list(t.shape)] for n, t in tensors.items()} != header:
                return "the tensors that torch reads differ from the file's own list"
            write(tensors, Path(target))
        return None
    except Exception as error:  # torch raises a dozen kinds for broken files
        return f"torch cannot read it ({type(error).__name__})"


def write(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Write tensors [any shape], in their dtypes, as a safetensors file: piece by piece, so that
    memory does not grow with it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(target, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            for part in tensor.detach().flatten().split(CHUNK):
                file.write(part.view(torch.uint8).numpy().data)


if __name__ == "__main__":
    main()
