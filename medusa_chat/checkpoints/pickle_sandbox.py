"""The pickle sandbox: files written by torch.save become safetensors before anything uses them.

Such a file is a pickle, a program that may do anything. First its list of tensors is worked out
without running it (layouts/pickles.py); then torch reads it with weights_only in a child process
with limits (`main` here), where it must hold what the list says; only the safetensors file written
by the child is loaded in our own process. It is kept in the cache under the hash of the content.
The job goes to the child as JSON on stdin, its answer comes as a JSON line: {"problem": null or
why the file is refused}.
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.layouts.headers import Entry, read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.process_limits import environment, limit_memory, lower
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
    command = [sys.executable, "-P", "-m", __name__]
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


try:
    import resource
except ImportError:  # Windows
    resource = None

DTYPES = {
    **{torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.float64: "F64"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"},
    **{torch.uint8: "U8", torch.bool: "BOOL"},
}
CHUNK = 1 << 22  # numbers looked at or written at once
SLACK = 1 << 30  # memory beyond the file's own size
GROWTH = 8  # tensors that share values are written apart: at most this often


class Refusal(Exception):
    """Why a file is refused, as the end of a sentence."""


def main() -> None:
    """Answer the job; whatever a file does to the reader is told as its problem."""
    job = json.load(sys.stdin)
    torch.set_num_threads(1)
    limit(job["bytes"], job["seconds"])
    print(json.dumps({"problem": problem_of(job)}), flush=True)


def limit(size: int, seconds: float) -> None:
    """Bound memory, processor time and what may be written. Windows has no such limits; there
    only the parent's clock holds."""
    if resource is None:
        return
    limit_memory(2 * size + SLACK)
    lower(resource.RLIMIT_CPU, int(seconds) + 60)
    lower(resource.RLIMIT_FSIZE, GROWTH * size + SLACK)
    lower(resource.RLIMIT_CORE, 0)


def problem_of(job: Mapping[str, Any]) -> str | None:
    """Convert the files of one job; None when all went well."""
    try:
        for source, target, expected in job["files"]:
            tensors = load(Path(source), expected, job["finite"])
            write(tensors, Path(target))
            compare(tensors, Path(target))
        return None
    except Refusal as error:
        return str(error)
    except Exception as error:  # torch raises a dozen kinds for broken files
        return f"torch cannot read it ({type(error).__name__})"


def load(file: Path, expected: Mapping[str, Any], finite: bool) -> dict[str, Tensor]:
    """The tensors of a file that torch.save wrote, by name. expected: name -> [dtype, shape] as its
    pickle was read to say; they must be that.
    Raises Refusal, and whatever torch raises."""
    tensors = torch.load(file, weights_only=True, map_location="cpu", mmap=True)
    if not isinstance(tensors, dict) or set(tensors) != set(expected):
        raise Refusal("torch reads tensors from it that its list does not name")
    for name, tensor in tensors.items():
        _check(name, tensor, expected[name], finite)
    if sum(tensor.nbytes for tensor in tensors.values()) > GROWTH * file.stat().st_size:
        raise Refusal(f"its tensors share storage and would take more than {GROWTH} times the file")
    return {name: tensor.detach() for name, tensor in tensors.items()}


def _check(name: str, tensor: Any, expected: list[Any], finite: bool) -> None:
    label = repr(name[:80])
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise Refusal(f"{label} is not a tensor")
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        raise Refusal(f"tensor {label} is {tensor.layout} on {tensor.device}, not plain values")
    if [DTYPES.get(tensor.dtype), list(tensor.shape)] != expected:
        raise Refusal(f"tensor {label} differs from the one in its list")
    if not tensor.is_contiguous() or tensor.nbytes > tensor.untyped_storage().nbytes():
        raise Refusal(f"tensor {label} is not contiguous in the file")
    if finite and not all(bool(torch.isfinite(part).all()) for part in _parts(tensor)):
        raise Refusal(f"tensor {label} holds NaN or infinity: the heads are broken")


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    yield from tensor.detach().flatten().split(CHUNK)


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
            for part in _parts(tensor):
                file.write(part.view(torch.uint8).numpy().data)


def compare(tensors: Mapping[str, Tensor], target: Path) -> None:
    """Read the written file again; names, shapes [...] and every byte must be those of `tensors`,
    whatever their dtypes. Raises Refusal."""
    with safe_open(target, framework="pt") as file:
        if set(file.keys()) != set(tensors):
            raise Refusal("the converted file differs from what was written: is the disk full?")
        for name, tensor in tensors.items():
            again = file.get_tensor(name)
            parts = zip(_parts(again), _parts(tensor), strict=True)
            if again.shape != tensor.shape or not all(
                torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in parts
            ):
                raise Refusal("the converted file differs from what was written: is the disk bad?")


if __name__ == "__main__":
    main()
