"""The weights of a GGUF file as one safetensors file, dequantised piece by piece.

gguf unpacks the blocks; what llama.cpp's converter changed is changed back: the rows of Llama's
queries and keys, the ones it added to Gemma's norms. transformers 5.23 gives the same bits, but
holds the whole model and walks the metadata in Python several times: 50 of its 69 seconds.
"""

import json
import math
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from medusa_chat.checkpoints.layouts.gguf_config import family_of
from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.gguf_names import renamed
from medusa_chat.checkpoints.layouts.gguf_types import TYPES, GgufHeader, Placed
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.errors import ModelError, first_line

DTYPES = {
    "fp32": (torch.float32, "F32", 4),
    "bf16": (torch.bfloat16, "BF16", 2),
    "fp16": (torch.float16, "F16", 2),
}
PIECE = 1 << 22  # weights that are unpacked at once: 16 MB of fp32, and as much beside it
THREADS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class GgufWeights:
    """What is converted. names: tensor of the file -> tensor of transformers. family: its name in
    the file. heads: (queries', keys'). precision: a key of DTYPES."""

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
        shapes = {place: self.header.tensors[name].shape for name, place in self.names.items()}
        if odd := sorted(shapes.keys() ^ expected.keys()):
            lacks = "lacks" if odd[0] in expected else "holds the tensor"
            why = "" if odd[0] in expected else f", which {config['model_type']} has no place for"
            raise ModelError(f"{self.file} {lacks} {odd[0]}{why}: take another GGUF file")
        for name, shape in shapes.items():
            if shape != expected[name]:
                raise ModelError(
                    f"{self.file}: tensor {name} is {shape}, {expected[name]} was expected: fetch "
                    "it again"
                )

    @property
    def bytes(self) -> int:
        """Bytes of the weights when they are written."""
        size = DTYPES[self.precision][2]
        return size * sum(math.prod(self.header.tensors[name].shape) for name in self.names)

    def write(self, path: Path) -> Iterator[int]:
        """Write a safetensors file; yields how many bytes of it are there, now and then."""
        done = 0
        with (
            open(self.file, "rb") as source,
            open(path, "wb") as target,
            ThreadPoolExecutor(THREADS) as pool,
        ):
            target.write(self._table())
            waiting: list[Future[bytes]] = []
            for job in self._pieces(source):
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
        for key, place in self.names.items():
            shape = self.header.tensors[key].shape
            end = start + size * math.prod(shape)
            table[place] = {"dtype": name, "shape": shape, "data_offsets": [start, end]}
            start = end
        text = json.dumps(table).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    def _pieces(self, source: BinaryIO) -> Iterator[tuple[np.ndarray, int, torch.dtype, float]]:
        """What _unpacked takes, for some rows at a time."""
        dtype = DTYPES[self.precision][0]
        for name in self.names:
            tensor = self.header.tensors[name]
            added = 1.0 if self.family.startswith("gemma") and name.endswith("norm.weight") else 0.0
            for rows in self.rows(source, name, tensor):
                yield rows, tensor.type, dtype, added

    def rows(self, source: BinaryIO, name: str, tensor: Placed) -> Iterator[np.ndarray]:
        """The rows of a tensor as they are stored, uint8 [rows, bytes of a row]; those of Llama's
        queries and keys in the order of transformers, for which they are read at once."""
        count = math.prod(tensor.shape[:-1]) if len(tensor.shape) > 1 else tensor.shape[0]
        wide = tensor.bytes // count
        heads = self._turned_heads(name)
        step = count if heads else max(1, PIECE // max(1, math.prod(tensor.shape) // count))
        source.seek(tensor.start)
        for start in range(0, count, step):
            rows = min(step, count - start)
            data = source.read(rows * wide)
            if len(data) != rows * wide:
                raise OSError(None, "it was cut while it was read")
            stored = np.frombuffer(data, np.uint8).reshape(rows, wide)
            yield _turned_back(stored, heads) if heads else stored

    def _turned_heads(self, name: str) -> int:
        """How many heads of a tensor have their rows in llama.cpp's order; 0 for none."""
        if self.family != "llama":
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


def _unpacked(stored: np.ndarray, kind: int, dtype: torch.dtype, added: float) -> bytes:
    """The numbers of some rows, in dtype."""
    import gguf  # only who has such a file needs it

    if TYPES[kind][1] == 1:  # numbers, not blocks: of a vector, one to a row
        stored = stored.reshape(-1)
    values = gguf.dequantize(stored, gguf.GGMLQuantizationType(kind))
    if added:
        values = values - np.float32(added)
    with torch.no_grad():
        found = torch.from_numpy(np.require(values, np.float32, "W")).to(dtype)
    return found.contiguous().view(torch.uint8).numpy().tobytes()
