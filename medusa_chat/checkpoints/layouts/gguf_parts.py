"""read_gguf(): the header of a GGUF file, of a split one that of all its parts together.

llama.cpp's gguf-split leaves the metadata in the first part and writes into each which one it is,
of how many, and how many tensors all of them have.
"""

from collections.abc import Sequence
from dataclasses import replace

from medusa_chat.checkpoints.layouts.entry import REMEDY
from medusa_chat.checkpoints.layouts.gguf_header import read_part
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader, Placed
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import part_of, parts_of

NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def read_gguf(source: Source, file: str) -> GgufHeader:
    """The header of a GGUF file; file: its name, of a split one that of any part. Raises
    ModelError, in one line, also for a part that is missing or belongs to another file."""
    names = parts_of(file)
    for name in names:
        if name not in source.files():
            raise ModelError(f"{source.name}/{name} is missing, {_told(name)}: fetch it too")
    headers = [_read_part(source, name) for name in names]
    tensors: dict[str, Placed] = {}
    for name, header in zip(names, headers, strict=True):
        if twice := tensors.keys() & header.tensors.keys():
            raise ModelError(
                f"{source.name}/{name} holds the tensor {min(twice)[:80]!r}, as a part before it "
                f"does: {REMEDY}"
            )
        last = name.rpartition("/")[2]
        tensors |= {key: replace(tensor, file=last) for key, tensor in header.tensors.items()}
    _refuse_others(source, names, headers, len(tensors))
    return GgufHeader(headers[0].metadata, tensors)


def _read_part(source: Source, name: str) -> GgufHeader:
    header = read_part(source, name)
    number, count = header.metadata.get(NUMBER, 0), header.metadata.get(COUNT, 1)
    said = (number + 1, count) if type(number) is type(count) is int and count > 1 else (1, 1)
    if said != part_of(name):
        what = "no part of a split file" if said == (1, 1) else f"part {said[0]} of {said[1]}"
        raise ModelError(
            f"{source.name}/{name} says that it is {what}: give it its own name, or fetch it again"
        )
    return header


def _refuse_others(
    source: Source, names: Sequence[str], headers: Sequence[GgufHeader], count: int
) -> None:
    """Refuse a part of another file, and a file that lacks tensors."""
    for name, header in zip(names, headers, strict=True):
        if (told := header.metadata.get(TENSORS, count)) != count:
            raise ModelError(
                f"{source.name}/{name} is of a file with {str(told)[:40]} tensors, and its parts "
                f"here have {count}: they are of several files, fetch all parts again"
            )


def _told(name: str) -> str:
    number, count = part_of(name)
    return f"part {number} of {count}" if count > 1 else "or a link to nothing"
