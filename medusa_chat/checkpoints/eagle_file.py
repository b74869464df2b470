"""EagleFile: an EAGLE drafter on disk, in any of its layouts, read into an EagleModel.

Each tool has its own names. They are mapped to those of speculators: `fc`, `layers.{i}.`, `norm`,
`lm_head`, `embed_tokens`, `d2t`, and in EAGLE-3 `layers.0.hidden_norm`, in 3.1 `fc_norm.{j}` or
`input_norm`. Files of llama.cpp (architecture "eagle3") are read as well.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, read_gguf
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder, read_json
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import INPUTS, NativeLinear, StoredRows
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel
from medusa_chat.errors import ModelError, first_line

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
LAYER = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "max_position_embeddings",
    "hidden_act",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
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

    def form(self, hidden: int, layers: int) -> EagleForm:
        """Its form, for a backbone of so many layers with states of `hidden` numbers. Raises
        ModelError."""
        count = self.tap_count(hidden)
        taps = self._taps(count, layers) if count else ()
        if len(taps) != count or not all(0 < tap < layers for tap in taps):
            raise ModelError(
                f"{self.path} reads the layers {list(taps)} and {count} states, and the backbone "
                f"has {layers} layers: give the backbone that it was trained on"
            )
        read = self._said
        return EagleForm(taps, bool(read("norm_before_residual")), bool(read("norm_output")))

    def _said(self, key: str) -> Any:
        nested = self.config.get("eagle_config")
        return self.config.get(key, nested.get(key) if isinstance(nested, Mapping) else None)

    def _taps(self, count: int, layers: int) -> tuple[int, ...]:
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
        raise ModelError(f"the layers that a drafter reads are {str(values)[:80]}: a list of numbers")
    return tuple(values)


def eagle_in(source: LocalFolder) -> EagleFile | None:
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
    if "fc.weight" not in names or not any(n.startswith("layers.0.") for n in names):
        return None
    where = source.folder / file
    known = _refused(names, where)
    header = read_header(source, file)
    shapes = {name: header[inside].shape for name, inside in known.items()}
    config = read_json(source, "config.json")
    inner = config.get("transformer_layer_config")
    merged = {**config, **inner} if isinstance(inner, Mapping) else config
    return EagleFile(where, known, shapes, merged)


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


def _in_gguf(source: LocalFolder, file: str) -> EagleFile | None:
    header = read_gguf(source, file)
    if header.metadata.get("general.architecture") != ARCHITECTURE:
        return None
    where = source.folder / file
    names = {_of_gguf(name): name for name in header.tensors if name != "rope_freqs.weight"}
    known = _refused(names, where)
    shapes = {name: tuple(header.tensors[inside].shape) for name, inside in known.items()}
    return EagleFile(where, known, shapes, _gguf_config(header, where), is_gguf=True)


def _of_gguf(name: str) -> str:
    """A tensor of llama.cpp by our name."""
    layer = re.match(r"^blk\.(\d+)\.(.*)\.(weight|bias)$", name)
    if layer:
        number, inner, end = layer.groups()
        return f"layers.{number}.{GGUF.get(inner, inner)}.{end}"
    inner, _, end = name.rpartition(".")
    return f"{GGUF.get(inner, inner)}.{end}" if inner else name


def _gguf_config(header: GgufHeader, where: Path) -> dict[str, Any]:
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


def read_eagle(
    found: EagleFile,
    backbone: tuple[Any, Any],
    sizes: tuple[int, int, int],
    device: torch.device,
    dtype: torch.dtype,
) -> EagleModel:
    """The drafter's modules on a device. backbone: its embedding and LM head, for a file that has
    none of its own; sizes: its width, layers and vocabulary. Raises ModelError."""
    hidden, layers, vocabulary = sizes
    form = found.form(hidden, layers)
    tensors = _tensors(found)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if not torch.isfinite(tensor).all():
                raise ModelError(f"{found.path}: {name} holds NaN or infinity: download it again")
            is_table = name == "embed_tokens.weight"
            tensors[name] = tensor.to(device, None if is_table else dtype)
    width = found.shapes["fc.weight"][0]
    own = tensors.get("embed_tokens.weight")
    if own is None and width != hidden:
        raise ModelError(f"{found.path} lacks embed_tokens.weight: download it again")
    logits = tensors.get("lm_head.weight")
    vocabulary = vocabulary if logits is None else len(logits)
    decoder = _decoder(found, form, tensors, device, dtype)
    eps = decoder.config.rms_norm_eps
    return EagleModel(
        form,
        decoder,
        _linear(tensors["fc.weight"], tensors.get("fc.bias")),
        [_norm(tensors[name], eps) for name in sorted(tensors) if name.startswith("fc_norm.")]
        or [_norm(tensors[name], eps) for name in tensors if name == "input_norm.weight"],
        _norm(tensors["layers.0.hidden_norm.weight"], eps) if form.taps else None,
        _norm(tensors["norm.weight"], eps) if "norm.weight" in tensors else None,
        None if own is None else nn.Embedding.from_pretrained(own),
        None if logits is None else _linear(logits, None),
        backbone,
        vocabulary,
        _ids(tensors.get("d2t"), vocabulary, found, device),
    ).requires_grad_(False)


def _ids(
    d2t: Tensor | None, count: int, found: EagleFile, device: torch.device
) -> Tensor | None:
    """The backbone's ids of the drafter's tokens: a difference, but in llama.cpp's files."""
    if d2t is None:
        return None
    if d2t.shape != (count,):
        raise ModelError(f"{found.path}: d2t is {tuple(d2t.shape)}, ({count},) was expected")
    ids = d2t.long() if found.is_gguf else d2t.long() + torch.arange(count)
    if int(ids.min()) < 0:
        raise ModelError(f"{found.path}: d2t holds ids below 0: download it again")
    return ids.to(device)


def _tensors(found: EagleFile) -> dict[str, Tensor]:
    """All that is read, on the CPU. Raises ModelError."""
    if found.is_gguf:
        return _gguf_tensors(found)
    path = found.path
    if path.suffix != ".safetensors":
        path = pickle_sandbox.convert([path]) / pickle_sandbox.target_names([path])[0]
    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(inside) for name, inside in found.names.items()}
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{found.path} cannot be read: {first_line(error)}") from error


def _gguf_tensors(found: EagleFile) -> dict[str, Tensor]:
    header = read_gguf(LocalFolder(found.path.parent, only=found.path.name), found.path.name)
    heads = (
        int(found.config["num_attention_heads"]),
        int(found.config.get("num_key_value_heads", found.config["num_attention_heads"])),
    )
    inside = {inner: inner for inner in found.names.values()}
    weights = GgufWeights(found.path, header, inside, "llama", heads)
    tensors = {name: weights.floats(inner, torch.float32) for name, inner in found.names.items()}
    return tensors | ({"d2t": tensors["d2t"].long()} if "d2t" in tensors else {})


def _decoder(
    found: EagleFile,
    form: EagleForm,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """Stock layers with the file's weights, and their rotary embedding."""
    has_norms = "layers.0.self_attn.q_norm.weight" in tensors
    kind, make = (Qwen3Config, Qwen3Model) if has_norms else (LlamaConfig, LlamaModel)
    options = {key: found.config[key] for key in LAYER if found.config.get(key) is not None}
    options["hidden_size"] = found.shapes["fc.weight"][0]
    options |= {"bos_token_id": None, "eos_token_id": None, "vocab_size": 1}
    config = kind(**options, num_hidden_layers=found.layers)
    try:
        with torch.device("meta"):
            decoder: Any = make(config)
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError(f"{found.path}: its config fits no layer: {first_line(error)}") from error
    for module_name, module in list(decoder.layers.named_modules()):
        prefix = f"layers.{module_name}"
        if isinstance(module, nn.Linear):
            if f"{prefix}.weight" not in tensors:
                raise ModelError(f"{found.path} lacks {prefix}.weight: download it again")
            own = _linear(tensors[f"{prefix}.weight"], tensors.get(f"{prefix}.bias"))
            is_wide = form.taps and re.fullmatch(r"0\.self_attn\.[qkv]_proj", module_name)
            expected = (module.out_features, module.in_features * (2 if is_wide else 1))
            if own.weight.shape != expected:
                raise ModelError(
                    f"{found.path}: {prefix}.weight is {tuple(own.weight.shape)}, {expected} was "
                    "expected by its config: download it again"
                )
            parent, _, name = module_name.rpartition(".")
            setattr(decoder.layers.get_submodule(parent), name, own)
        elif hasattr(module, "weight"):
            if f"{prefix}.weight" in tensors:
                module.weight = nn.Parameter(tensors[f"{prefix}.weight"], requires_grad=False)
            elif form.taps or prefix != "layers.0.input_layernorm":
                raise ModelError(f"{found.path} lacks {prefix}.weight: download it again")
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    return decoder


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    norm = nn.RMSNorm(len(weight), eps)
    norm.weight = nn.Parameter(weight, requires_grad=False)
    return norm


def pack(model: EagleModel, library: NativeLibrary) -> None:
    """Let C multiply the drafter's weights, in 8 bits where their shape allows: no text depends on
    them, and a draft reads half as much."""
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            rows = StoredRows.of(module.weight) if module.in_features % INPUTS == 0 else None
            model.set_submodule(name, NativeLinear(module, library, rows))
