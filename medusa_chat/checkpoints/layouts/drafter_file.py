"""DrafterFile: what drafts beside a backbone, on disk or on the Hub, before any values are read.

It is recognised by the names of its tensors, which each tool writes in its own way; each kind maps
them to its own names for them, and refuses what it has no place for.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import Source, read_json
from medusa_chat.errors import ModelError
from medusa_chat.units import gb

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "hydra_lm_head.pt")
ENDINGS = (".safetensors", ".bin", ".pt", ".gguf")
INDEX = "model.safetensors.index.json"
VOWELS = "AEFHILMNORSX"  # letters whose names begin with one: "an MLP speculator"
PADDING = 4096  # tokens by which the tables of one tokenizer may differ
# a layer's tensors in files of llama.cpp -> transformers
GGUF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class Sizes(NamedTuple):
    """What a drafter must fit of a backbone: numbers of a state, layers, and tokens."""

    hidden: int
    layers: int
    vocabulary: int


@dataclass(frozen=True)
class DrafterFile(ABC):
    """A drafter before any values are read. paths: its weight files; names: canonical name -> name
    in the files; shapes: by canonical name; config: of its layers, with what it says of its form;
    is_gguf: whether it is a file of llama.cpp's, whose `d2t` holds ids."""

    paths: tuple[Path, ...]
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    bytes: int
    is_gguf: bool = False

    @property
    def path(self) -> Path:
        """For messages."""
        return self.paths[0]

    @property
    @abstractmethod
    def label(self) -> str:
        """The name of its kind in words."""

    @property
    def article(self) -> str:
        """The name with its article."""
        is_an = self.label[0] in VOWELS and self.label[1].isupper()
        return f"{'an' if is_an else 'a'} {self.label}"

    @property
    def noun(self) -> str:
        """What it is, with its article."""
        return self.article if self.label.endswith("speculator") else f"{self.article} drafter"

    @property
    @abstractmethod
    def shape_words(self) -> str:
        """How large it is, and what it reads."""

    @property
    def words(self) -> str:
        """What it is and takes, for a report."""
        return f"{self.label}, {self.shape_words} ({gb(self.bytes)})"

    @property
    @abstractmethod
    def needs(self) -> str:
        """What its backbone must have, for a report."""

    @property
    def use(self) -> str:
        """How it is used, for a sentence that begins with its name."""
        return (
            f"is {self.noun}, not a model: load the model that it was trained on, "
            f"{self.needs}, with this as --draft"
        )

    @abstractmethod
    def refuse_other(self, backbone: Sizes) -> None:
        """Raises ModelError where the backbone is not the one that it was trained on, as far as
        the shapes and the config tell."""

    def refuse_tokens(self, backbone: Sizes) -> None:
        """Raises ModelError for a backbone with another vocabulary, whose padding may differ."""
        table = self.shapes.get("embed_tokens.weight")
        own = table[0] if table else self.config.get("vocab_size")
        if type(own) is int and abs(own - backbone.vocabulary) > PADDING:
            raise ModelError(
                f"{self.path} was trained on a model of {own:,} tokens, and the backbone has "
                f"{backbone.vocabulary:,}: give the backbone that it was trained on"
            )

    @property
    def layers(self) -> int:
        """How many decoder layers it has."""
        numbers = (int(n.split(".")[1]) for n in self.names if n.startswith("layers."))
        return 1 + max(numbers, default=-1)

    @property
    def cache_bytes(self) -> int:
        """Bytes of keys and values for each token of the text, in 16 bits."""
        rows = sum(
            shape[0] for name, shape in self.shapes.items() if name.endswith("k_proj.weight")
        )
        return 2 * 2 * rows

    @property
    def cost(self) -> str:
        """What it takes, for a report."""
        words = f"{gb(self.bytes)} to download and to hold"
        kept = self.cache_bytes * 1000
        return f"{words}, and {gb(kept)} for 1,000 tokens of the text" if kept else words


class PathHeadsFile(DrafterFile):
    """Heads that read the path before them: Hydra's, or an MLP speculator's."""

    @property
    @abstractmethod
    def sizes(self) -> tuple[int, int]:
        """Numbers of a state, and tokens."""

    @property
    def needs(self) -> str:
        """See DrafterFile."""
        width, tokens = self.sizes
        return f"whose states have {width} numbers and which has {tokens:,} tokens"

    def refuse_other(self, backbone: Sizes) -> None:
        """See DrafterFile. The padding of the vocabulary may differ."""
        width, tokens = self.sizes
        if width != backbone.hidden or abs(tokens - backbone.vocabulary) > PADDING:
            raise ModelError(
                f"{self.path} is for states of {width} numbers and {tokens:,} tokens, and the "
                f"backbone has {backbone.hidden} and {backbone.vocabulary:,}: give the backbone "
                "that it was trained on"
            )


class Found(NamedTuple):
    """The files of a source that may hold a drafter. shapes: tensor -> shape, as they are named
    there; header: of a GGUF file."""

    source: Source
    files: tuple[str, ...]
    shapes: Mapping[str, tuple[int, ...]]
    header: GgufHeader | None = None

    @property
    def paths(self) -> tuple[Path, ...]:
        """Where the files are on this disk, or by their repo's name."""
        folder: Path = getattr(self.source, "folder", Path(self.source.name))
        return tuple(folder / file for file in self.files)

    @property
    def bytes(self) -> int:
        sizes = self.source.files()
        return sum(sizes[file] for file in self.files)

    @property
    def config(self) -> dict[str, Any]:
        """config.json, with what it says of the layers in a part of their own. Raises
        ModelError."""
        config = read_json(self.source, "config.json")
        inner = config.get("transformer_layer_config")
        return {**config, **inner} if isinstance(inner, Mapping) else config

    def read(self, key: str) -> Any:
        """What a GGUF file says under its architecture's name."""
        assert self.header is not None
        return self.header.metadata.get(f"{self.architecture}.{key}")

    @property
    def architecture(self) -> str:
        """Of a GGUF file; empty for others."""
        return str(self.header.metadata.get("general.architecture")) if self.header else ""

    def named(self, canonical: Callable[[str], str]) -> dict[str, str]:
        """Canonical name -> name in the files."""
        return {canonical(name): name for name in self.shapes}


def found_in(source: Source, is_drafter: Callable[[Iterable[str]], bool]) -> Found | None:
    """The weight files of a folder with a config.json, or else a GGUF file beside which there are
    no other weights; of several files that an index lists only where its tensors are a drafter's.
    Raises ModelError."""
    files = source.files()
    if chosen := _weight_files(source, is_drafter):
        shapes = {}
        for file in chosen:
            shapes |= {name: entry.shape for name, entry in read_header(source, file).items()}
        return Found(source, chosen, shapes)
    stored = [name for name in files if name.endswith(ENDINGS)]
    if len(stored) != 1 or not stored[0].endswith(".gguf"):
        return None
    header = read_gguf(source, stored[0])
    shapes = {name: tuple(one.shape) for name, one in header.tensors.items()}
    return Found(source, (stored[0],), shapes, header)


def _weight_files(source: Source, is_drafter: Callable[[Iterable[str]], bool]) -> tuple[str, ...]:
    files = source.files()
    if "config.json" not in files:
        return ()
    if chosen := [name for name in WEIGHTS if name in files][:1]:
        return tuple(chosen)
    table = read_json(source, INDEX).get("weight_map") if INDEX in files else None
    named = table if isinstance(table, dict) and is_drafter(table) else {}
    return tuple(sorted({file for file in named.values() if file in files}))


def of_gguf(name: str, outside: Mapping[str, str], inside: Mapping[str, str] = GGUF_LAYER) -> str:
    """A tensor of llama.cpp by our name. outside: names out of layers; inside: within them."""
    layer = re.match(r"^blk\.(\d+)\.(.*)\.(weight|bias)$", name)
    if layer:
        number, inner, end = layer.groups()
        return f"layers.{number}.{inside.get(inner, inner)}.{end}"
    inner, _, end = name.rpartition(".")
    return f"{outside.get(inner, inner)}.{end}" if inner else name


def gguf_layers(found: Found) -> dict[str, Any]:
    """What a GGUF file says of its layers, by transformers' keys."""
    config = {
        "hidden_size": found.read("embedding_length"),
        "intermediate_size": found.read("feed_forward_length"),
        "num_attention_heads": found.read("attention.head_count"),
        "num_key_value_heads": found.read("attention.head_count_kv"),
        "head_dim": found.read("attention.key_length") or found.read("rope.dimension_count"),
        "rms_norm_eps": found.read("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": found.read("context_length"),
        "rope_theta": found.read("rope.freq_base"),
    }
    return {key: value for key, value in config.items() if value is not None}


def known(
    found: Found,
    names: Mapping[str, str],
    read: re.Pattern[str],
    unread: re.Pattern[str],
    what: str,
) -> dict[str, str]:
    """The names that are read. what: what the file should be, with its article. Raises ModelError
    for a tensor that has no place there."""
    kept = {name: inside for name, inside in names.items() if not unread.match(name)}
    odd = next((name for name in kept if not read.match(name)), None)
    if odd is not None:
        raise ModelError(
            f"{found.paths[0]} holds the unexpected tensor {odd[:80]!r}: it is not {what} that "
            "medusa-chat knows"
        )
    return kept


def refuse_shapes(
    where: Path,
    shapes: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int | None, ...]],
) -> None:
    """Raises ModelError for a tensor among `shapes` that has another shape than is `expected` of
    it; None for any size above 0."""
    for name, sizes in expected.items():
        own = shapes.get(name, sizes)
        pairs = zip(own, sizes, strict=False)
        if len(own) == len(sizes) and all(a == b if b is not None else a != 0 for a, b in pairs):
            continue
        words = ", ".join("n" if size is None else str(size) for size in sizes)
        raise ModelError(
            f"{where}: {name} is {own}, ({words}{',' if len(sizes) == 1 else ''}) was expected: "
            "download it again"
        )


def numbers_of(values: object) -> tuple[int, ...]:
    """The layers that a config names. Raises ModelError."""
    if not isinstance(values, list | tuple) or not all(type(v) is int for v in values):
        raise ModelError(
            f"the drafter's config says that it reads the layers {str(values)[:80]}, which is no "
            "list of numbers: download it again"
        )
    return tuple(values)


def refuse_taps(path: Path, taps: tuple[int, ...], count: int, layers: int) -> None:
    """Raises ModelError for layers that a backbone of so many does not have, or that are not as
    many as the `count` states that the file reads."""
    if len(taps) != count or not all(0 < tap < layers for tap in taps):
        raise ModelError(
            f"{path} reads the layers {list(taps)} and {count} states, and the backbone has "
            f"{layers} layers: give the backbone that it was trained on"
        )
