"""Headers: names, dtypes and shapes of the tensors in a weight file, bounds checked; no torch.

safetensors checks a header only in a file that lies whole on this disk, and huggingface_hub's own
parser believes shapes and offsets; here a header from a Hub repo is checked before its data is had.
"""

import json
from typing import Any

from medusa_chat.checkpoints.layouts.entry import MAX_DIMENSIONS, REMEDY, SIZES, Entry
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.checkpoints.layouts.torch_archive import read_archive
from medusa_chat.errors import ModelError

MAX_HEADER = 32_000_000
MAX_PARTS = 1_000_000  # commas: a mixture with 89,000 tensors in one file has 450,000


def read_header(source: Source, file: str) -> dict[str, Entry]:
    """The tensors of a .safetensors, .pt or .bin file. Raises ModelError."""
    first_bytes(source, file)
    size, where = source.files()[file], f"{source.name}/{file}"
    if file.endswith(".safetensors"):
        return _read_safetensors(source, file, size, where)
    return read_archive(source, file, size, where)


def first_bytes(source: Source, file: str) -> bytes:
    """The first 64 bytes of a file of weights. Raises ModelError for one that is not there, is
    empty, or is something else under its name."""
    size = source.files().get(file, -1)
    where = f"{source.name}/{file}"
    if size < 0:
        raise ModelError(f"{where} is not a readable file (a broken link?): {REMEDY}")
    if size == 0:
        raise ModelError(f"{where} is empty: {REMEDY}")
    start = source.read(file, 0, 64)
    if start.startswith(b"version https://git-lfs"):
        raise ModelError(f"{where} is a Git LFS pointer, not the file: run git lfs pull")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise ModelError(f"{where} is a web page, not the file: {REMEDY}")
    return start


def _read_safetensors(source: Source, file: str, size: int, where: str) -> dict[str, Entry]:
    length = int.from_bytes(source.read(file, 0, 8), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER):
        raise ModelError(
            f"{where} is cut short or not a safetensors file: its header of {length} bytes "
            f"does not fit in {size} bytes: {REMEDY}"
        )
    try:
        return parse_header(source.read(file, 8, length), size - 8 - length)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is broken: {error or 'nested too deep'}: {REMEDY}") from error


def parse_header(text: bytes, data: int) -> dict[str, Entry]:
    """Parse a safetensors header whose tensors must fill exactly `data` bytes, without overlap.

    Raises ValueError with the reason.
    """
    if not text.startswith(b"{"):
        raise ValueError("its header is not a JSON object")
    if text.count(b",") > MAX_PARTS:  # parsing many small texts takes seconds
        raise ValueError(f"its header has over {MAX_PARTS:,} entries, which no model needs")
    try:
        values = json.loads(text, object_pairs_hook=_distinct)
    except UnicodeDecodeError as error:
        raise ValueError("its header is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise ValueError("its header is not valid JSON") from error
    values.pop("__metadata__", None)
    spans = []
    header = {}
    for name, value in values.items():
        header[name], span = _entry(name, value)
        spans.append((*span, name))
    end = 0
    for start, stop, name in sorted(spans):
        if start != end:
            raise ValueError(f"tensor {name[:80]!r} overlaps another or leaves a gap")
        end = stop
    if end != data:
        raise ValueError(f"its tensors need {end} bytes and it has {data}")
    return header


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has a duplicate name")
    return found


def _entry(name: str, value: Any) -> tuple[Entry, tuple[int, int]]:
    """One tensor and its span of bytes; shape and span must agree."""
    label = repr(name[:80])
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"tensor {label} is not described by dtype, shape and data_offsets")
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in SIZES:
        raise ValueError(f"tensor {label} has the unknown dtype {str(dtype)[:40]!r}")
    if not _are_counts(shape) or len(shape) > MAX_DIMENSIONS:
        raise ValueError(f"tensor {label} has no valid shape")
    if not _are_counts(span) or len(span) != 2:
        raise ValueError(f"tensor {label} has no valid offsets")
    entry = Entry(dtype, tuple(shape), name)
    if span[1] - span[0] != entry.bytes:
        raise ValueError(f"tensor {label} has a size that does not match its shape")
    return entry, (span[0], span[1])


def _are_counts(value: Any) -> bool:
    """Whether it is a list of whole numbers from 0 to 2**48 (True is none)."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n <= 2**48 for n in value)
