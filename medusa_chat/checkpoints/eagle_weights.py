"""The weights of an EAGLE drafter: an EagleFile read into an EagleModel."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.eagle_file import EagleFile
from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import INPUTS, NativeLinear, StoredRows
from medusa_chat.decoding.drafters.eagle_model import EagleForm, EagleModel
from medusa_chat.errors import ModelError, first_line

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


def form_of(found: EagleFile, hidden: int, layers: int) -> EagleForm:
    """The form of a drafter for a backbone of so many layers with states of `hidden` numbers.
    Raises ModelError."""
    count = found.tap_count(hidden)
    taps = found.taps(count, layers) if count else ()
    if len(taps) != count or not all(0 < tap < layers for tap in taps):
        raise ModelError(
            f"{found.path} reads the layers {list(taps)} and {count} states, and the backbone "
            f"has {layers} layers: give the backbone that it was trained on"
        )
    said = found.said
    return EagleForm(taps, bool(said("norm_before_residual")), bool(said("norm_output")))


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
    form = form_of(found, hidden, layers)
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


def _ids(d2t: Tensor | None, count: int, found: EagleFile, device: torch.device) -> Tensor | None:
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
