"""The names and shapes in a file that torch.save wrote, read without torch.

Such a file is a zip archive: data.pkl, a pickle that names the tensors (pickles.py), and one entry
for each storage. torch reads the values later, in a child process (pickle_sandbox.py).
"""

import io
import zipfile
from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.entry import MAX_DIMENSIONS, REMEDY, SIZES, Entry
from medusa_chat.checkpoints.layouts.pickles import Refusal, Storage, tensors_of
from medusa_chat.checkpoints.layouts.source import Source, Stream
from medusa_chat.errors import ModelError

SAFE = "ask its author for a .safetensors file"
MAX_PICKLE = 4_000_000
MAX_ENTRIES = 65_536


def read_archive(source: Source, file: str, size: int, where: str) -> dict[str, Entry]:
    """The tensors of a .pt or .bin file. Raises ModelError."""
    if source.read(file, 0, 4) != b"PK\x03\x04":
        raise ModelError(
            f"{where} is not a torch.save archive (cut short, or written before "
            "torch 1.6): fetch it again, or ask its author for a .safetensors file"
        )
    try:
        with zipfile.ZipFile(io.BufferedReader(Stream(source, file, size), 65_536)) as archive:
            storages, program = _entries(archive, size)
        found = tensors_of(program)
        return {name: _checked(name, tensor, storages) for name, tensor in found.items()}
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
        raise Refusal("it has too many entries, or two of one name")
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
    """A tensor must lie dense and row by row inside its storage."""
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


def _are_counts(values: tuple[Any, ...]) -> bool:
    return all(type(n) is int and 0 <= n <= 2**48 for n in values)
