"""The child process of the pickle sandbox: reads pickled tensors under limits, writes safetensors.

It is started by pickle_sandbox.py and by nothing else. The job comes as JSON on stdin, the
answer goes as a JSON line to stdout: {"problem": null or why the file is refused}.
"""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from medusa_chat.checkpoints.process_limits import limit_memory, lower

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
