"""GgufHeader: the header of a GGUF file, the format of llama.cpp, read and checked.

The libraries that read GGUF files trust every count, length and offset, so each is checked here
before it is used. Tensor values are not read. The format: "GGUF", version, two counts, then
(key, type, value) and (name, dimensions, type, offset) one after another. A split file
(llama.cpp's gguf-split) has its metadata in the first part, and in each part which one it is, of
how many, and how many tensors there are in total.
"""

import math
import struct
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from medusa_chat.checkpoints.layouts.headers import REMEDY, first_bytes
from medusa_chat.checkpoints.layouts.source import LocalFolder, Source
from medusa_chat.errors import ModelError
from medusa_chat.gguf_files import part_of, parts_of

# type of a tensor -> its name, how many weights a block has, and how many bytes
TYPES = {
    **{0: ("F32", 1, 4), 1: ("F16", 1, 2), 27: ("I64", 1, 8), 30: ("BF16", 1, 2)},
    **{2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20), 6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24)},
    **{8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110)},
    **{12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210)},
    **{16: ("IQ2_XXS", 256, 66), 17: ("IQ2_XS", 256, 74), 18: ("IQ3_XXS", 256, 98)},
    **{19: ("IQ1_S", 256, 50), 20: ("IQ4_NL", 32, 18), 21: ("IQ3_S", 256, 110)},
    **{22: ("IQ2_S", 256, 82), 23: ("IQ4_XS", 256, 136), 29: ("IQ1_M", 256, 56)},
    **{34: ("TQ1_0", 256, 54), 35: ("TQ2_0", 256, 66), 39: ("MXFP4", 32, 17)},
}
# type -> bytes of 32 weights as our C code keeps them (decoding/backends/kernels/packed.h)
KEPT: Mapping[int, float] = {
    **{2: 18, 3: 20, 6: 22, 7: 24, 8: 34, 10: 10.5, 11: 14.25, 12: 18.5, 13: 22.5, 14: 26.25},
    **{20: 18, 23: 17.25, 39: 17},
}
EIGHT_BITS = 34  # the same of types that it takes as Q8_0
# what llama.cpp's quantiser calls its mixtures of types, by general.file_type
MIXTURES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K"},
    **{11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S"},
    **{17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS"},
    **{23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S"},
    **{29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4"},
}
MIXTURE = "general.file_type"
EMBEDDINGS = "token_embd.weight"
STACK = "_exps.weight"  # how the name of a tensor of all experts ends
TABLES = (EMBEDDINGS, "output.weight")  # often of another type than the layers


@dataclass(frozen=True)
class Placed:
    """A tensor in a file. shape: rows first, as in torch; type: a key of TYPES; start: its first
    byte in the file; file: the name of the part it is in, of a split file."""

    shape: tuple[int, ...]
    type: int
    start: int
    bytes: int
    file: str = ""

    @property
    def is_in_blocks(self) -> bool:
        """Whether it is a matrix of quantised blocks. Stacks of several are none."""
        return len(self.shape) == 2 and TYPES[self.type][1] > 1

    @property
    def kept_bytes(self) -> int:
        """Its bytes as our C code lays it out."""
        return int(math.prod(self.shape) * KEPT.get(self.type, EIGHT_BITS) / 32)


@dataclass(frozen=True)
class GgufHeader:
    """metadata: texts, numbers and short lists of numbers by key; of lists of texts and long lists
    only the length. tensors: by name, in the order of the file or its parts."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, Placed]

    def packed_bytes(self, only: str = "") -> int:
        """Bytes of the matrices in blocks as our C code lays them out, or of one by its name; 0
        where all is floats."""
        named = ((name, one) for name, one in self.tensors.items() if only in ("", name))
        matrices = [one for _, one in named if one.is_in_blocks]
        return sum(one.kept_bytes for one in matrices)

    @property
    def wide_weights(self) -> int:
        """Weights of all else but experts in blocks, which lies in memory in 16 bits."""
        stacks = {id(one) for one in self._stacks()}
        rest = (one for one in self.tensors.values() if not one.is_in_blocks)
        return sum(math.prod(one.shape) for one in rest if id(one) not in stacks)

    @property
    def stacked(self) -> tuple[int, int]:
        """Of experts in blocks the bytes as our C code lays them out, and the weights."""
        stacks = self._stacks()
        return sum(one.kept_bytes for one in stacks), sum(math.prod(one.shape) for one in stacks)

    def _stacks(self) -> list[Placed]:
        """The weights of all experts of a layer, where they are in blocks."""
        named = ((name, one) for name, one in self.tensors.items() if STACK in name)
        return [one for _, one in named if len(one.shape) == 3 and TYPES[one.type][1] > 1]

    @property
    def quantisation(self) -> str:
        """What the file's mixture of types is called; where it does not say so, the type that most
        bytes of the layers have."""
        kinds = {TYPES[one.type][0] for one in self.tensors.values() if one.shape[1:]}
        told = MIXTURES.get(self.metadata.get(MIXTURE, -1), "")
        if told and any(told.startswith(kind) for kind in kinds):
            return told
        sizes: dict[str, int] = {}
        inside = {name: one for name, one in self.tensors.items() if name not in TABLES}
        for tensor in (inside or self.tensors).values():
            name = TYPES[tensor.type][0]
            sizes[name] = sizes.get(name, 0) + tensor.bytes
        return max(sizes, key=lambda name: sizes[name])


CHUNK = 1 << 20
LENGTH, LONGEST_ASCII = struct.Struct("<Q"), 127  # a length to which all eight bytes are ASCII
MAX_HEADER = 64_000_000  # bytes; 262,144 tokens with their merges take 14 MB
MAX_TEXT = 1 << 20  # bytes of a text
MAX_TEXTS = 2_000_000  # of all arrays: the largest known has 262,144 tokens and 514,906 merges


class Broken(Exception):
    """What is wrong with a file, as the end of a sentence."""


class GgufReader:
    """Reads the values of a header one after another, and no more than is asked for. whole: keys of
    arrays that are wanted whole."""

    def __init__(
        self, source: Source, file: str, size: int, whole: Container[str] = frozenset()
    ) -> None:
        self._source, self._file, self.whole = source, file, whole
        self._most = min(size, MAX_HEADER)
        self._is_long = size > MAX_HEADER
        self.data = bytearray()
        self.place = 0
        self._texts = 0

    def take(self, length: int) -> int:
        """Read the next `length` bytes; their offset in `data`."""
        start, end = self.place, self.place + length
        self._fill(end)
        self.place = end
        return start

    def _fill(self, end: int) -> int:
        """Have `data` reach to `end`; how far it reaches."""
        if end > self._most:
            long = f"its header is larger than {MAX_HEADER} bytes"
            raise Broken(long if self._is_long else "it is cut short, or a length in it is wrong")
        while len(self.data) < end:
            piece = self._source.read(self._file, len(self.data), CHUNK)
            if not piece:
                raise Broken("it is cut short")
            self.data += piece
        return len(self.data)

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        whole = f"<{count}{form}"
        return struct.unpack_from(whole, self.data, self.take(struct.calcsize(whole)))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self, most: int, what: str) -> str:
        length = self.number("Q")
        if length > most:
            raise Broken(_too_long(what, length, most))
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise Broken(f"{what} is not UTF-8") from error

    def texts(self, count: int, what: str, is_wanted: bool) -> list[str]:
        """The next texts, or, where they are not wanted, none of them. A vocabulary has hundreds of
        thousands, so that no method is called for each."""
        self._texts += count
        if self._texts > MAX_TEXTS:
            raise Broken(
                f"{what} brings its texts to {self._texts}: at most {MAX_TEXTS} are allowed"
            )
        begin, width = self.place, LENGTH.size
        ends = self._ends(count, what)
        try:
            if not is_wanted:  # what stands between them is ASCII
                self.data[begin : self.place].decode()
                return []
            starts = [begin, *ends[:-1]]
            data = bytes(self.data[: self.place])
            return [data[a + width : b].decode() for a, b in zip(starts, ends, strict=False)]
        except UnicodeDecodeError as error:
            raise Broken(f"a text of {what} is not UTF-8") from error

    def _ends(self, count: int, what: str) -> list[int]:
        """Where each of the next texts ends. Their lengths are made ASCII where they are none."""
        data, place, filled = self.data, self.place, len(self.data)
        length_at, width = LENGTH.unpack_from, LENGTH.size
        ends: list[int] = []
        for _ in range(count):
            start = place + width
            if start > filled:
                filled = self._fill(start)
            (length,) = length_at(data, place)
            if length > LONGEST_ASCII:
                if length > MAX_TEXT:
                    raise Broken(_too_long(f"a text of {what}", length, MAX_TEXT))
                data[place:start] = bytes(width)
            place = start + length
            if place > filled:
                filled = self._fill(place)
            ends.append(place)
        self.place = place
        return ends


def _too_long(what: str, length: int, most: int) -> str:
    return f"{what} has {length} bytes: at most {most} are allowed"


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
MERGES, SCORES = "tokenizer.ggml.merges", "tokenizer.ggml.scores"
VOCABULARY = (TOKENS, KINDS, MERGES, SCORES)
MODEL = "tokenizer.ggml.model"
VOCABULARIES = ("gpt2", "llama", "gemma4")  # byte-level and sentencepiece, by llama.cpp's names
BESIDE = (3, 4)  # kinds of token: control, user-defined
TEXT, ARRAY = 8, 9  # types of values; all others are numbers
NUMBERS = {
    **{0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?"},
    **{10: "Q", 11: "q", 12: "d"},
}
T = TypeVar("T")


def read_vocabulary(source: Source, file: str) -> Mapping[str, Any]:
    """The metadata of a GGUF file, the first part of a split one, with its vocabulary whole. Raises
    ModelError, in one line."""
    return read_part(source, file, VOCABULARY).metadata


def read_part(source: Source, file: str, whole: Container[str] = frozenset()) -> GgufHeader:
    """The header of one file. A part of a split file may have no tensors, and all but the first
    have no tokenizer. whole: keys of arrays that its metadata has whole. Raises ModelError, in one
    line."""
    where = f"{source.name}/{file}"
    start = first_bytes(source, file)
    if start[:4] != MAGIC:
        raise ModelError(f"{where} is not a GGUF file: it does not begin with GGUF: {REMEDY}")
    size = source.files()[file]
    try:
        return _parse(GgufReader(source, file, size, whole), file, size)
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
    if KINDS not in reader.whole:
        metadata.pop(KINDS, None)
    return GgufHeader(metadata, placed)


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
        texts = reader.texts(count, what, key in reader.whole)
        return texts if key in reader.whole else count
    if inner not in NUMBERS:
        raise Broken(f"{what} is an array of the unknown type {inner}")
    values = reader.numbers(NUMBERS[inner], count)
    return list(values) if count <= FEW or key == KINDS or key in reader.whole else count


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
    """A tensor, checked to be inside the file. start: of all tensors; step: their alignment."""
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
    """Refuse special tokens outside the vocabulary, and more kinds than tokens."""
    tokens, kinds = metadata.get(TOKENS), metadata.get(KINDS)
    is_whole = isinstance(tokens, list) and tokens and isinstance(tokens[0], str)
    count = len(tokens) if is_whole else tokens
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


NUMBER, COUNT, TENSORS = "split.no", "split.count", "split.tensors.count"


def read_gguf(source: Source, file: str) -> GgufHeader:
    """The header of a GGUF file; file: its name, or that of any part. Raises ModelError, in one
    line, also for a part that is missing or belongs to another file. On this disk an unchanged
    file is read once: a load asks three times."""
    if not isinstance(source, LocalFolder):
        return _read_parts(source, file)
    stamps = [source.stamp(name) for name in parts_of(file) if name in source.files()]
    try:
        return _read_known(source.folder, file, tuple(stamps))
    except ModelError:  # once more, to name the source as the user does
        return _read_parts(source, file)


@lru_cache(maxsize=2)
def _read_known(folder: Path, file: str, stamps: tuple[Any, ...]) -> GgufHeader:
    """stamps: what tells the parts' contents from others."""
    return _read_parts(LocalFolder(folder, only=file), file)


def _read_parts(source: Source, file: str) -> GgufHeader:
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
            f"{source.name}/{name} says that it is {what}: give it its own name, or "
            "download it again"
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
                f"here have {count}: they are of several files, download all parts again"
            )


def _told(name: str) -> str:
    number, count = part_of(name)
    return f"part {number} of {count}" if count > 1 else "or a link to nothing"


MAX_COUNT = 2**31


def count(metadata: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A count of at least 1, of a list the one for all layers. Raises ModelError for anything else,
    and where layers differ."""
    value = metadata.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise ModelError(
            f"{where} has a different {key} in each layer, which is not supported: take the "
            "model's safetensors"
        )
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): download it again")
    return value


def positive(metadata: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    """A positive number. Raises ModelError for anything else, and where there is no default."""
    value = metadata.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): download it again")
    return float(value)


def layers_of(metadata: Mapping[str, Any], family: str, where: str) -> int:
    """Layers of the model itself, without those after them that draft tokens (multi-token
    prediction). Raises ModelError."""
    key = f"{family}.nextn_predict_layers"
    layers, drafts = count(metadata, f"{family}.block_count", where), metadata.get(key, 0)
    if type(drafts) is not int or not 0 <= drafts < layers:
        raise ModelError(f"{where} has no valid {key} ({str(drafts)[:40]}): download it again")
    return layers - drafts
