"""Headers: names, dtypes and shapes of the tensors in a weight file, with bounds checks. No torch.

safetensors checks only headers of complete files on disk, and huggingface_hub's parser trusts
shapes and offsets; this one checks the header of a file on the Hub before the download. A file from
torch.save is a zip archive: data.pkl, a pickle that names the tensors (pickles.py), and one entry
for each storage.
"""

import io
import json
import math
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.checkpoints.layouts.pickles import Refusal, Storage, tensors_of
from medusa_chat.checkpoints.layouts.source import Source, Stream
from medusa_chat.errors import ModelError

# bytes of one number, under the names that safetensors uses
SIZES = {
    **{"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2},
    **{"I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1},
    **{"F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1},
}


MAX_DIMENSIONS = 8


REMEDY = "download it again"


@dataclass(frozen=True)
class Entry:
    """Dtype and shape of one tensor in a file. key: equal for tensors that share a storage."""

    dtype: str
    shape: tuple[int, ...]
    key: str = ""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.numel * SIZES[self.dtype]


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
    """The first 64 bytes of a weight file. Raises ModelError for one that is missing, empty or
    something else under that name."""
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
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("its header has a duplicate name")
    return values


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


SAFE = "ask its author for a .safetensors file"
MAX_PICKLE = 4_000_000
MAX_ENTRIES = 65_536


def read_archive(source: Source, file: str, size: int, where: str) -> dict[str, Entry]:
    """The tensors of a .pt or .bin file. Raises ModelError."""
    if source.read(file, 0, 4) != b"PK\x03\x04":
        raise ModelError(
            f"{where} is not a torch.save archive (cut short, or written before "
            "torch 1.6): download it again, or ask its author for a .safetensors file"
        )
    try:
        with zipfile.ZipFile(io.BufferedReader(Stream(source, file, size), 65_536)) as archive:
            storages, program = _entries(archive, size)
        tensors = tensors_of(program)
        return {name: _checked(name, tensor, storages) for name, tensor in tensors.items()}
    except ModelError:
        raise
    except Refusal as error:
        raise ModelError(f"{where} is refused: {error}: {SAFE}") from error
    except Exception as error:  # zipfile and a broken pickle raise a dozen kinds
        raise ModelError(f"{where} is broken or cut short: {REMEDY}") from error


def _entries(archive: zipfile.ZipFile, size: int) -> tuple[dict[str, int], bytes]:
    """Bytes of each storage by its key, and the pickle."""
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(entries) > MAX_ENTRIES or len(set(names)) != len(names):
        raise Refusal("it has too many entries, or two with the same name")
    if any(e.compress_type or e.flag_bits & 1 or e.compress_size != e.file_size for e in entries):
        raise Refusal("its entries are compressed, which torch.save never does")
    if sum(entry.file_size for entry in entries) > size:
        raise Refusal("its entries are larger than the file")
    programs = [e for e in entries if e.filename.partition("/")[2] == "data.pkl"]
    if len(programs) != 1 or programs[0].file_size > MAX_PICKLE:
        raise Refusal(f"it has not exactly one data.pkl of at most {MAX_PICKLE} bytes")
    root = programs[0].filename.partition("/")[0]
    if f"{root}/byteorder" in names and archive.read(f"{root}/byteorder") != b"little":
        raise Refusal("its tensors are big-endian")
    prefix = f"{root}/data/"
    sizes = {e.filename.removeprefix(prefix): e.file_size for e in entries if prefix in e.filename}
    return sizes, archive.read(programs[0])


def _checked(name: str, tensor: tuple[Any, ...], storages: Mapping[str, int]) -> Entry:
    """A tensor must be contiguous, in row-major order, and inside its storage."""
    label = repr(name[:80])
    storage, offset, shape, strides, dtype = tensor
    if not isinstance(storage, Storage) or not _are_counts((offset, *shape, *strides)):
        raise Refusal(f"tensor {label} is malformed")
    if len(shape) != len(strides) or len(shape) > MAX_DIMENSIONS:
        raise Refusal(f"tensor {label} is malformed")
    entry = Entry(dtype or storage.dtype, tuple(shape), storage.key)
    step = 1
    for length, stride in zip(reversed(shape), reversed(strides), strict=True):
        if length > 1 and stride != step:
            raise Refusal(f"tensor {label} is not contiguous (strides {strides})")
        step *= length
    if storage.key not in storages:
        raise Refusal(f"tensor {label} has no data in the file")
    if offset * SIZES[entry.dtype] + entry.bytes > storages[storage.key]:
        raise Refusal(f"tensor {label} is larger than its data in the file")
    return entry


def _are_counts(values: Any) -> bool:
    """Whether these are whole numbers from 0 to 2**48 (True is none)."""
    is_row = isinstance(values, list | tuple)
    return is_row and all(type(n) is int and 0 <= n <= 2**48 for n in values)
