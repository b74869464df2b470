"""read_part(): the header of one GGUF file, the format of llama.cpp, read and checked.

Every count, length and offset is checked before it is used, for the libraries that read such a file
believe them. Imports no package; the tensors' values stay where they are. The format: "GGUF",
version, two counts, then (key, type, value) and (name, dimensions, type, offset) one after another.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from medusa_chat.checkpoints.layouts.entry import REMEDY
from medusa_chat.checkpoints.layouts.gguf_reader import MAX_TEXT, Broken, GgufReader
from medusa_chat.checkpoints.layouts.gguf_types import TYPES, GgufHeader, Placed
from medusa_chat.checkpoints.layouts.headers import first_bytes
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import part_of

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_KEYS = 10_000
MAX_ALIGNMENT = 1 << 20
MAX_TENSORS = 100_000
MAX_NAME = 300  # bytes of a key or of a tensor's name; llama.cpp allows 64 for a tensor
MAX_TEMPLATE = 1 << 16  # bytes of a chat template, as where it is rendered
MAX_ARRAY = 4_000_000  # entries; the merges of the largest known vocabulary are 0.5 million
FEW = 4096  # numbers of an array that are kept; of a longer one, and of texts, the count
MAX_ADDED = 100_000  # tokens that stand beside the vocabulary: adding them takes quadratic time
TEMPLATE = "tokenizer.chat_template"
TOKENS, KINDS = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
MODEL = "tokenizer.ggml.model"
VOCABULARIES = ("gpt2", "llama", "gemma4")  # byte-level and sentencepiece, by llama.cpp's names
BESIDE = (3, 4)  # kinds of token: control, user-defined
TEXT, ARRAY = 8, 9  # types of values; all others are numbers
NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
T = TypeVar("T")


def read_part(source: Source, file: str) -> GgufHeader:
    """The header of one file by itself: a part of a split one may have no tensors of its own, and
    all but the first no tokenizer. Raises ModelError, in one line."""
    where = f"{source.name}/{file}"
    start = first_bytes(source, file)
    if start[:4] != MAGIC:
        raise ModelError(f"{where} is not a GGUF file: it does not begin with GGUF: {REMEDY}")
    size = source.files()[file]
    try:
        return _parse(GgufReader(source, file, size), file, size)
    except Broken as error:
        raise ModelError(f"{where} is broken: {error}: {REMEDY}") from error


def _parse(reader: GgufReader, file: str, size: int) -> GgufHeader:
    number, count = part_of(file)
    reader.take(len(MAGIC))
    version = reader.number("I")
    if version not in VERSIONS:
        big = version & 0xFFFF == 0
        kind = "big-endian" if big else f"version {version}"
        raise Broken(f"it is {kind}, and only little-endian files of version 2 and 3 are read")
    tensors, keys = reader.numbers("Q", 2)
    if not (count == 1) <= tensors <= MAX_TENSORS or keys > MAX_KEYS:
        raise Broken(
            f"it claims {tensors} tensors and {keys} keys: 1 to {MAX_TENSORS} tensors and at most "
            f"{MAX_KEYS} keys are allowed"
        )
    metadata = _distinct(_metadata(reader, keys), "key")
    infos = _distinct(_infos(reader, tensors), "tensor")
    if number == 1:
        _refuse_odd_tokens(metadata)
    step = metadata.get("general.alignment", 32)
    if type(step) is not int or not 8 <= step <= MAX_ALIGNMENT or step & (step - 1):
        raise Broken(f"its general.alignment is {str(step)[:40]}, not a power of two from 8")
    start = -(-reader.place // step) * step
    placed = {n: _placed(n, *info, start, step, size) for n, info in infos.items()}
    _refuse_overlap(placed)
    return GgufHeader({k: v for k, v in metadata.items() if k != KINDS}, placed)


def _distinct(pairs: Iterator[tuple[str, T]], what: str) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, value in pairs:
        if name in found:
            raise Broken(f"it has the {what} {name[:80]!r} twice")
        found[name] = value
    return found


def _metadata(reader: GgufReader, count: int) -> Iterator[tuple[str, Any]]:
    for _ in range(count):
        key = reader.text(MAX_NAME, "a key")
        yield key, _value(reader, key, reader.number("I"))


def _value(reader: GgufReader, key: str, kind: int) -> Any:
    what = f"its {key[:80]!r}"
    if kind == TEXT:
        most = MAX_TEMPLATE if key.startswith(TEMPLATE) else MAX_TEXT
        return reader.text(most, what)
    if kind in NUMBERS:
        return reader.number(NUMBERS[kind])
    if kind != ARRAY:
        raise Broken(f"{what} is of the unknown type {kind}")
    inner, count = reader.number("I"), reader.number("Q")
    if count > MAX_ARRAY:
        raise Broken(f"{what} has {count} entries: at most {MAX_ARRAY} are allowed")
    if inner == TEXT:
        reader.skip_texts(count, what)
        return count
    if inner not in NUMBERS:
        raise Broken(f"{what} is an array of the unknown type {inner}")
    values = reader.numbers(NUMBERS[inner], count)
    return list(values) if count <= FEW or key == KINDS else count


def _infos(
    reader: GgufReader, count: int
) -> Iterator[tuple[str, tuple[tuple[int, ...], int, int]]]:
    """(name, (shape, type, offset)) of each tensor."""
    for _ in range(count):
        name = reader.text(MAX_NAME, "the name of a tensor")
        dimensions = reader.number("I")
        if not 1 <= dimensions <= 4:
            raise Broken(f"tensor {name[:80]!r} has {dimensions} dimensions")
        shape = tuple(reversed(reader.numbers("Q", dimensions)))
        yield name, (shape, reader.number("I"), reader.number("Q"))


def _placed(
    name: str, shape: tuple[int, ...], kind: int, offset: int, start: int, step: int, size: int
) -> Placed:
    """A tensor that lies inside the file. start: of all tensors; step: of their places."""
    label = f"tensor {name[:80]!r}"
    if kind not in TYPES:
        raise Broken(f"{label} is of the unknown type {kind}")
    words, weights, length = TYPES[kind]
    if min(shape) < 1 or math.prod(shape) > 2**48 or shape[-1] % weights:
        raise Broken(f"{label} has the shape {shape}, which its type cannot have")
    if len(shape) == 1 and weights > 1:
        raise Broken(f"{label} is a vector in blocks ({words}), which only matrices are")
    if offset % step:
        raise Broken(f"{label} begins at {offset}, which is not a multiple of {step}")
    taken = math.prod(shape) // weights * length
    if start + offset + taken > size:
        raise Broken(f"{label} ends at byte {start + offset + taken} and the file at {size}")
    return Placed(shape, kind, start + offset, taken)


def _refuse_overlap(tensors: Mapping[str, Placed]) -> None:
    end = 0
    for start, length, name in sorted((t.start, t.bytes, n) for n, t in tensors.items()):
        if start < end:
            raise Broken(f"tensor {name[:80]!r} overlaps another")
        end = start + length


def _refuse_odd_tokens(metadata: Mapping[str, Any]) -> None:
    """Ids of special tokens must be in the vocabulary, each token has one kind at most."""
    count, kinds = metadata.get(TOKENS), metadata.get(KINDS)
    if type(count) is not int or count < 1:
        raise Broken("it holds no tokenizer")
    if (kind := metadata.get(MODEL)) not in VOCABULARIES:
        raise Broken(f"its tokenizer is of the kind {str(kind)[:40]!r}, which is not supported")
    for key, value in metadata.items():
        is_id = key.startswith("tokenizer.ggml.") and key.endswith("_token_id")
        if is_id and (type(value) is not int or not 0 <= value < count):
            raise Broken(f"its {key} is {str(value)[:40]}, and it has {count} tokens")
    if not isinstance(kinds, list):
        return
    if len(kinds) != count:
        raise Broken(f"it has {count} tokens and the kinds of {len(kinds)}")
    if (beside := sum(kind in BESIDE for kind in kinds)) > MAX_ADDED:
        raise Broken(f"it has {beside} special tokens: at most {MAX_ADDED} are allowed")
