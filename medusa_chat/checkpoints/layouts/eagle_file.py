"""EagleFile: an EAGLE drafter on disk, recognised by the names of its tensors.

Each tool has its own names. They are mapped to those of speculators: `fc`, `layers.{i}.`, `norm`,
`lm_head`, `embed_tokens`, `d2t`, and in EAGLE-3 `layers.0.hidden_norm`, in 3.1 `fc_norm.{j}` or
`input_norm`. Files of llama.cpp (architecture "eagle3") are read as well.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import Source, read_json
from medusa_chat.errors import ModelError
from medusa_chat.units import gb

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
RENAMED = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^pre_lm_head_layernorm\."), "norm."),
)
PROJECTIONS = r"self_attn\.[qkvo]_proj\.(weight|bias)|self_attn\.[qk]_norm\.weight"
KNOWN = re.compile(
    r"^(fc\.(weight|bias)|norm\.weight|lm_head\.weight|embed_tokens\.weight|d2t|input_norm\.weight"
    r"|fc_norm\.\d+\.weight|layers\.\d+\.(hidden_norm\.weight|input_layernorm\.weight"
    rf"|post_attention_layernorm\.weight|mlp\.(gate|up|down)_proj\.(weight|bias)|{PROJECTIONS}))$"
)
UNREAD = re.compile(r"^(t2d$|verifier_|.*rotary_emb\.inv_freq$)")
# tensors of llama.cpp -> ours
GGUF = {
    "fc": "fc",
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_norm_2": "hidden_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURE = "eagle3"
USE = (
    "is an EAGLE drafter, not a model: load the model that it was trained on, with this as --draft"
)
UNKNOWN_PARTS = {  # tensors of drafters that are not read -> what they are
    "mask_hidden": "P-EAGLE",
    "embedding_layernorm.weight": "HASS",
    "hidden_states_layernorm.weight": "HASS",
}


@dataclass(frozen=True)
class EagleFile:
    """A drafter before any values are read. names: canonical name -> name in the file; shapes: by
    canonical name; config: of the layer, with what the file says of its form; is_gguf: whether
    `d2t` holds ids and the heads' rows are in llama.cpp's order."""

    path: Path
    names: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]
    config: Mapping[str, Any]
    bytes: int
    is_gguf: bool = False

    @property
    def reads_taps(self) -> bool:
        """Whether it is EAGLE-3 or 3.1."""
        return "layers.0.hidden_norm.weight" in self.names

    @property
    def label(self) -> str:
        """Its name in words."""
        if not self.reads_taps:
            return "EAGLE-1"
        is_newer = self.config.get("norm_output") or "fc_norm.0.weight" in self.names
        return "EAGLE-3.1" if is_newer else "EAGLE-3"

    @property
    def words(self) -> str:
        """What it is, for a report."""
        width, read = self.shapes["fc.weight"]
        rows = self.shapes.get("lm_head.weight", (0,))[0]
        tokens = f", drafts {rows:,} tokens" if rows else ""
        reads = f"reads {read} numbers a token" if self.reads_taps else "reads the last state"
        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''} of width {width}"
        return f"{self.label}, {layers}, {reads} of its backbone{tokens} ({gb(self.bytes)})"

    @property
    def layers(self) -> int:
        return 1 + max(int(n.split(".")[1]) for n in self.names if n.startswith("layers."))

    def tap_count(self, hidden: int) -> int:
        """How many states of the backbone it reads, each of `hidden` numbers. Raises ModelError."""
        own, width = self.shapes["fc.weight"]
        fits = width % hidden == 0 if self.reads_taps else width == own + hidden
        if not fits:
            raise ModelError(
                f"{self.path} reads states of {width} numbers, and the backbone's have {hidden}: "
                "give the backbone that it was trained on"
            )
        return width // hidden if self.reads_taps else 0

    def said(self, key: str) -> Any:
        """What the config says of its form, at the top or nested; None for nothing."""
        nested = self.config.get("eagle_config")
        return self.config.get(key, nested.get(key) if isinstance(nested, Mapping) else None)

    def taps(self, count: int, layers: int) -> tuple[int, ...]:
        """The places in transformers' `hidden_states`: as they stand at the top of a config, and
        one more where SGLang's list is nested or DeepSpec names layers by their outputs."""
        key, nested = "eagle_aux_hidden_state_layer_ids", self.config.get("eagle_config")
        if self.config.get(key):
            return _numbers(self.config[key])
        if isinstance(nested, Mapping) and nested.get(key):
            return tuple(tap + 1 for tap in _numbers(nested[key]))
        if self.config.get("target_layer_ids"):
            return tuple(tap + 1 for tap in _numbers(self.config["target_layer_ids"]))
        return (2, layers // 2, layers - 3) if count == 3 else ()


def _numbers(values: object) -> tuple[int, ...]:
    if not isinstance(values, list | tuple) or not all(type(v) is int for v in values):
        raise ModelError(
            f"the drafter's config says that it reads the layers {str(values)[:80]}, which is no "
            "list of numbers: download it again"
        )
    return tuple(values)


def is_eagle(names: Iterable[str]) -> bool:
    """Whether a file with these tensors holds an EAGLE drafter."""
    known = {_canonical(name) for name in names}
    return "fc.weight" in known and any(name.startswith("layers.0.") for name in known)


def eagle_in(source: Source) -> EagleFile | None:
    """The EAGLE drafter of a folder or a GGUF file, None where it holds none. Raises ModelError for
    one that is not known."""
    files = source.files()
    stored = next((name for name in files if name.endswith(".gguf")), None)
    if stored is not None and len(files) == 1:
        return _in_gguf(source, stored)
    file = next((name for name in WEIGHTS if name in files), None)
    if file is None or "config.json" not in files:
        return None
    names = {_canonical(name): name for name in read_header(source, file)}
    if not is_eagle(names):
        return None
    where = _path(source, file)
    known = _refused(names, where)
    header = read_header(source, file)
    shapes = {name: header[inside].shape for name, inside in known.items()}
    config = read_json(source, "config.json")
    inner = config.get("transformer_layer_config")
    merged = {**config, **inner} if isinstance(inner, Mapping) else config
    return EagleFile(where, known, shapes, merged, files[file])


def _path(source: Source, file: str) -> Path:
    """Where the file is on this disk, or by its repo's name."""
    folder: Path = getattr(source, "folder", Path(source.name))
    return folder / file


def _canonical(name: str) -> str:
    for pattern, new in RENAMED:
        name = pattern.sub(new, name)
    return name


def _refused(names: Mapping[str, str], where: Path) -> dict[str, str]:
    """The names that are read. Raises ModelError for one that has no place here."""
    for name, kind in UNKNOWN_PARTS.items():
        if name in names:
            raise ModelError(f"{where} is a {kind} drafter, which cannot be used yet: take EAGLE-3")
    kept = {name: inside for name, inside in names.items() if not UNREAD.match(name)}
    odd = next((name for name in kept if not KNOWN.match(name)), None)
    if odd is not None:
        raise ModelError(
            f"{where} holds the unexpected tensor {odd[:80]!r}: it is no EAGLE drafter that "
            "medusa-chat knows"
        )
    return kept


def _in_gguf(source: Source, file: str) -> EagleFile | None:
    header = read_gguf(source, file)
    if header.metadata.get("general.architecture") != ARCHITECTURE:
        return None
    where = _path(source, file)
    names = {_of_gguf(name): name for name in header.tensors if name != "rope_freqs.weight"}
    known = _refused(names, where)
    shapes = {name: tuple(header.tensors[inside].shape) for name, inside in known.items()}
    return EagleFile(where, known, shapes, _gguf_config(header), source.files()[file], True)


def _of_gguf(name: str) -> str:
    """A tensor of llama.cpp by our name."""
    layer = re.match(r"^blk\.(\d+)\.(.*)\.(weight|bias)$", name)
    if layer:
        number, inner, end = layer.groups()
        return f"layers.{number}.{GGUF.get(inner, inner)}.{end}"
    inner, _, end = name.rpartition(".")
    return f"{GGUF.get(inner, inner)}.{end}" if inner else name


def _gguf_config(header: GgufHeader) -> dict[str, Any]:
    def read(key: str) -> Any:
        return header.metadata.get(f"{ARCHITECTURE}.{key}")

    config = {
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_attention_heads": read("attention.head_count"),
        "num_key_value_heads": read("attention.head_count_kv"),
        "head_dim": read("attention.key_length") or read("rope.dimension_count"),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": read("context_length"),
        "rope_theta": read("rope.freq_base"),
        "eagle_aux_hidden_state_layer_ids": read("target_layers") or read("extract_layers"),
        "norm_before_residual": read("norm_before_residual"),
    }
    return {key: value for key, value in config.items() if value is not None}
