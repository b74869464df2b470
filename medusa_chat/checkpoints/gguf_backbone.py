"""A GGUF file as an ordinary folder: converted once, kept in our cache, and read from there.

The weights are dequantised piece by piece by gguf, and what llama.cpp's converter changed is
changed back: the row order of queries and keys of Llama and its kin, the 1 added to Gemma's norms.
transformers 5.23 gives the same bits, but holds the whole model and walks the metadata in Python
several times: 50 of its 69 seconds.
"""

import json
import math
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_chat import paths
from medusa_chat.checkpoints import kept_copies
from medusa_chat.checkpoints.gguf_tokenizer import write_tokenizer
from medusa_chat.checkpoints.kept_copies import Origin
from medusa_chat.checkpoints.layouts.contents import backbone_of
from medusa_chat.checkpoints.layouts.folders import BackboneFiles
from medusa_chat.checkpoints.layouts.gguf_config import end_tokens, family_of
from medusa_chat.checkpoints.layouts.gguf_header import TYPES, GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.gguf_names import (
    TURNED,
    TURNED_KEYS,
    is_split,
    renamed,
    shapes,
)
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.locate import Checkpoint, News
from medusa_chat.errors import ModelError, first_line
from medusa_chat.messages import LoadPhase
from medusa_chat.units import gb

DTYPES = {
    "fp32": (torch.float32, "F32", 4),
    "bf16": (torch.bfloat16, "BF16", 2),
    "fp16": (torch.float16, "F16", 2),
}
PIECE = 1 << 22  # weights that are unpacked at once: 16 MB of fp32, and as much beside it
PAIRED = ("llama", "mistral3", "smollm3", "granite", "granitemoe")  # queries and keys reordered
RAISED = ("gemma", "gemma2", "gemma3")  # norms with 1 added
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class GgufWeights:
    """What is converted. file: of a split one the first part. names: tensor of the file -> tensor
    of transformers. family: its name in the file. heads: (queries', keys'). precision: a key of
    DTYPES."""

    file: Path
    header: GgufHeader
    names: Mapping[str, str]
    family: str
    heads: tuple[int, int]
    precision: str

    @classmethod
    def of(cls, file: Path, config: Mapping[str, Any], precision: str) -> "GgufWeights":
        """The weights of a file. config: what was read of it. Raises ModelError."""
        header = read_gguf(LocalFolder(file.parent, only=file.name), file.name)
        family = family_of(header, str(file))
        heads = config["num_attention_heads"], config["num_key_value_heads"]
        return cls(file, header, renamed(header, family, str(file)), family, heads, precision)

    def refuse_unlike(self, config: Mapping[str, Any]) -> None:
        """Refuse tensors that are not those of the model, which transformers would leave out, or
        make up at random. Raises ModelError."""
        expected = _expected(config, self.file)
        found = self._shapes
        if odd := sorted(found.keys() ^ expected.keys()):
            lacks = "lacks" if odd[0] in expected else "holds the tensor"
            why = "" if odd[0] in expected else f", which {config['model_type']} has no place for"
            raise ModelError(f"{self.file} {lacks} {odd[0]}{why}: take another GGUF file")
        for name, shape in found.items():
            if shape != expected[name]:
                raise ModelError(
                    f"{self.file}: tensor {name} is {shape}, {expected[name]} was expected: "
                    "download it again"
                )

    @property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        return shapes(self.header, self.names, self.family)

    @property
    def size(self) -> int:
        """Bytes of the weights when they are written."""
        size = DTYPES[self.precision][2]
        return size * sum(map(math.prod, self._shapes.values()))

    def write(self, path: Path) -> Iterator[int]:
        """Write a safetensors file; yields how many bytes of it are there, now and then."""
        done = 0
        with open(path, "wb") as target, ThreadPoolExecutor(THREADS) as pool:
            target.write(self._table())
            waiting: list[Future[bytes]] = []
            for job in self._pieces():
                waiting.append(pool.submit(_unpacked, *job))
                if len(waiting) > THREADS:  # so much is in memory at once, and no more
                    done += target.write(waiting.pop(0).result())
                    yield done
            for one in waiting:
                done += target.write(one.result())
        yield done

    def _table(self) -> bytes:
        """The header of the safetensors file."""
        _, name, size = DTYPES[self.precision]
        table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        start = 0
        for place, shape in self._shapes.items():
            end = start + size * math.prod(shape)
            table[place] = {"dtype": name, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _pieces(self) -> Iterator[tuple[Any, ...]]:
        """What _unpacked takes, for some rows at a time."""
        dtype = DTYPES[self.precision][0]
        for names, part, parts in self._parts():
            name, kinds = names[0], [self.header.tensors[name].type for name in names]
            added = 1.0 if self.family in RAISED and name.endswith("norm.weight") else 0.0
            is_turned = self._is_turned(name)
            pieces: list[Iterable[np.ndarray]] = [self.rows(name, part, parts) for name in names]
            if is_turned:
                pieces = [[np.concatenate(list(rows))] for rows in pieces]
            for rows in zip(*pieces, strict=True):
                stored = list(zip(rows, kinds, strict=True))
                yield stored, dtype, added, is_turned, f"{self.file}: tensor {name}"

    def _is_turned(self, name: str) -> bool:
        return name.endswith(TURNED_KEYS) or (self.family in TURNED and "_exps." in name)

    def _parts(self) -> Iterator[tuple[Sequence[str], int, int]]:
        """(tensors of the file, which part of them, of how many) in the order in which they are
        written: whole ones, and for each expert its gate before its up, or both at once."""
        together: dict[str, list[str]] = {}
        for name, place in self.names.items():
            together.setdefault(place, []).append(name)
        for names in map(sorted, together.values()):
            is_paired = self._is_turned(names[0]) and not is_split(names[0])
            apart = [names] if is_paired else [[name] for name in names]
            parts = self.header.tensors[names[0]].shape[0] if is_paired or len(names) > 1 else 1
            yield from ((few, part, parts) for part in range(parts) for few in apart)

    def rows(self, name: str, part: int = 0, parts: int = 1) -> Iterator[np.ndarray]:
        """The rows of a tensor as they are stored, uint8 [rows, bytes of a row], or of one of so
        many equal parts; those of reordered queries and keys in the order of transformers, for
        which they are read at once."""
        tensor = self.header.tensors[name]
        whole = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        wide, count = tensor.bytes // whole, whole // parts
        heads = self._turned_heads(name)
        step = count if heads else max(1, PIECE // max(1, math.prod(tensor.shape) // whole))
        with open(self.file.with_name(tensor.file), "rb") as source:
            source.seek(tensor.start + part * count * wide)
            for start in range(0, count, step):
                rows = min(step, count - start)
                data = source.read(rows * wide)
                if len(data) != rows * wide:
                    raise OSError(None, "it was cut while it was read")
                stored = np.frombuffer(data, np.uint8).reshape(rows, wide)
                yield _turned_back(stored, heads) if heads else stored

    def _turned_heads(self, name: str) -> int:
        """How many heads of a tensor have their rows in llama.cpp's order; 0 for none."""
        if self.family not in PAIRED:
            return 0
        return self.heads[0] if ".attn_q." in name else self.heads[1] if ".attn_k." in name else 0


def _expected(config: Mapping[str, Any], file: Path) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a model with this config."""
    try:
        whole = AutoConfig.for_model(**config)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(whole, attn_implementation="eager")
    except Exception as error:  # transformers raises all kinds for odd numbers
        raise ModelError(f"the config in {file} cannot be read: {first_line(error)}") from error
    found = {name: tuple(one.shape) for name, one in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        found.pop("lm_head.weight", None)
    return found


def _turned_back(stored: np.ndarray, heads: int) -> np.ndarray:
    """Rows (first, second, first, second of a head's pairs) -> all first ones, all second ones."""
    pairs = stored.reshape(heads, stored.shape[0] // heads // 2, 2, stored.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(stored.shape)


def _unpacked(
    stored: Sequence[tuple[np.ndarray, int]],
    dtype: torch.dtype,
    added: float,
    is_turned: bool,
    what: str,
) -> bytes:
    """The numbers of some rows, in dtype. stored: the rows and their type; is_turned: of an expert
    all, column by column, of its gate and of its up in turn. what: they are of. Raises ModelError
    for what is none."""
    parts = [_numbers(rows, kind) for rows, kind in stored]
    values = np.stack([part.T for part in parts], -1) if is_turned else parts[0]
    if not np.isfinite(values).all():
        raise ModelError(f"{what} holds values that are no numbers: download the file again")
    if added:
        values = values - np.float32(added)
    with torch.no_grad():
        found = torch.from_numpy(np.require(values, np.float32, "W")).to(dtype)
    return found.contiguous().view(torch.uint8).numpy().tobytes()


def _numbers(stored: np.ndarray, kind: int) -> np.ndarray:
    import gguf  # only who has such a file needs it

    count = len(stored)
    if TYPES[kind][1] == 1:  # numbers, not blocks: of a vector, one to a row
        stored = stored.reshape(-1)
    with np.errstate(all="ignore"):
        return gguf.dequantize(stored, gguf.GGMLQuantizationType(kind)).reshape(count, -1)


KIND = "gguf"
FORMAT = 4
BESIDE = 32 << 20  # bytes of the tokenizer and the config, at most
TICK_SECONDS = 0.2
SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def converted(found: Checkpoint, precision: str) -> Generator[News, None, Checkpoint]:
    """The checkpoint with its backbone as a folder: itself where it is none of a GGUF file, else
    what was converted now or before, one "convert" for each piece of news. precision: fp32, bf16
    and fp16 are kept as such, what is quantised then comes from bf16. Closing it leaves nothing
    behind. Raises ModelError."""
    if not found.weights.stored:
        return found
    file = found.source
    stored = precision if precision in DTYPES else "bf16"
    parts = [found.backbone / name for name in found.weights.files]
    folder = kept_copies.place(KIND, [FORMAT, stored, *_versions()], parts)
    weights = _read(folder)
    if weights is None:
        yield from _locked(found, file, stored, folder)
        weights = _read(folder)
    if weights is None:
        raise ModelError(f"{file} was converted, but {folder} cannot be read: try again")
    what = f"{file.name} ({found.weights.stored}) is read as it was converted to {stored}"
    weights, notes = replace(weights, kept=found.weights.kept), (*found.notes, what)
    return replace(found, backbone=folder, weights=weights, original=file, notes=notes)


def _versions() -> list[str]:
    """Versions of the packages that convert. Raises ModelError where one is not installed."""
    try:
        return [metadata.version(name) for name in ("gguf", "transformers")]
    except metadata.PackageNotFoundError as error:
        raise ModelError("GGUF files need the package gguf: pip install gguf") from error


def converted_folder(found: Checkpoint, precision: str) -> Checkpoint:
    """The result of `converted`, without its progress."""
    steps = converted(found, precision)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


def write_settings(found: Checkpoint, folder: Path) -> None:
    """Write the config and the tokenizer of a GGUF file into a folder, as they are beside what is
    converted. Raises ModelError, also for tensors that are not those of its family; no weight is
    read."""
    weights = GgufWeights.of(found.source, found.weights.config, "bf16")
    weights.refuse_unlike(found.weights.config)
    _write_settings(folder, weights, found.weights.config, "bf16")


def _read(folder: Path) -> BackboneFiles | None:
    """What was converted; a damaged copy is dropped, to be made anew."""
    if not kept_copies.is_kept(folder):
        return None
    try:
        weights = backbone_of(LocalFolder(folder))
        if weights is not None and weights.has_tokenizer:
            return weights
    except ModelError:
        pass
    kept_copies.drop(folder)
    return None


def _locked(found: Checkpoint, file: Path, stored: str, folder: Path) -> Iterator[News]:
    """Convert while no other process does; where one has done so meanwhile, there is no need."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder.parent / f".{folder.name}.lock")
        waits = LoadPhase("convert", note=f"another process converts {file.name}: waiting for it")
        while not lock.is_locked:
            try:
                lock.acquire(timeout=TICK_SECONDS)
            except Timeout:
                yield waits, None
        try:
            if not kept_copies.is_kept(folder):
                yield from _convert(found, file, stored, folder)
        finally:
            lock.release()
    except OSError as error:
        raise ModelError(
            f"{file} cannot be converted in {folder.parent} ({error.strerror or error}): free disk "
            "space there, or set --data-dir"
        ) from error


def _convert(found: Checkpoint, file: Path, stored: str, folder: Path) -> Iterator[News]:
    config = found.weights.config
    weights = GgufWeights.of(file, config, stored)
    weights.refuse_unlike(config)
    size = weights.size
    if not kept_copies.has_room(folder, size + BESIDE):
        raise ModelError(
            f"{file} takes {gb(size)} in {folder.parent} once converted, and its disk is full: "
            "free some (medusa-chat models rm), or set --data-dir"
        )
    told = f"{gb(found.weights.bytes)}, {found.weights.stored}"
    note = f"converting {file.name} ({told}) once to {stored}: takes {gb(size)} in {folder.parent}"
    phase = LoadPhase("convert", total=size, note=note)
    yield phase, None
    with kept_copies.writing(folder, _origin(found, file, stored)) as partial:
        _write_settings(partial, weights, config, stored)
        for done in weights.write(partial / "model.safetensors"):
            yield replace(phase, done=done), None


def _origin(found: Checkpoint, file: Path, stored: str) -> Origin:
    """Named by the repo that the file is of, else by its path."""
    return Origin(found.repo or str(file.absolute()), str(file.resolve()), stored)


def _write_settings(folder: Path, weights: GgufWeights, config: Any, stored: str) -> None:
    _write_config(folder, weights.header, config, stored)
    write_tokenizer(folder, weights.file)


def _write_config(folder: Path, header: GgufHeader, config: Any, stored: str) -> None:
    dtype = str(DTYPES[stored][0]).removeprefix("torch.")
    ends = end_tokens(header)
    generation = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    if SUPPRESSED in header.metadata:  # of Gemma 4's 12B; a note at the load names it
        generation["suppress_tokens"] = header.metadata[SUPPRESSED]
    paths.write_text(folder / "config.json", json.dumps({**config, "dtype": dtype}, indent=2))
    paths.write_text(
        folder / "generation_config.json", json.dumps(generation | {"eos_token_id": ends})
    )
