"""The weights of drafters: their files' tensors, and stock layers that hold them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from medusa_chat.checkpoints import pickle_sandbox
from medusa_chat.checkpoints.gguf_weights import GgufWeights
from medusa_chat.checkpoints.layouts.drafter_file import DrafterFile
from medusa_chat.checkpoints.layouts.gguf_header import read_gguf
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_weights import INPUTS, NativeLinear, StoredRows
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
TABLES = ("embed_tokens.weight", "markov_head.markov_w1.weight")  # in the file's own dtype


def tensors_of(
    found: DrafterFile, device: torch.device, dtype: torch.dtype, family: str = "llama"
) -> dict[str, Tensor]:
    """All tensors that are read, by canonical name, on a device. family: whose order the heads'
    rows have in a GGUF file. Raises ModelError."""
    tensors = _of_gguf(found, family) if found.is_gguf else _of_files(found)
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if not torch.isfinite(tensor).all():
                raise ModelError(f"{found.path}: {name} holds NaN or infinity: download it again")
            tensors[name] = tensor.to(device, None if name in TABLES else dtype)
    return tensors


def _of_files(found: DrafterFile) -> dict[str, Tensor]:
    paths = list(found.paths)
    if paths[0].suffix != ".safetensors":
        folder = pickle_sandbox.convert(paths)
        paths = [folder / name for name in pickle_sandbox.target_names(paths)]
    named, tensors = {inside: name for name, inside in found.names.items()}, {}
    for path in paths:
        try:
            with safe_open(path, framework="pt") as opened:
                own = named.keys() & set(opened.keys())
                tensors |= {named[inside]: opened.get_tensor(inside) for inside in own}
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {first_line(error)}") from error
    return tensors


def _of_gguf(found: DrafterFile, family: str) -> dict[str, Tensor]:
    header = read_gguf(LocalFolder(found.path.parent, only=found.path.name), found.path.name)
    count = found.config.get("num_attention_heads")
    heads = count, found.config.get("num_key_value_heads", count)
    if not all(type(one) is int and one > 0 for one in heads):
        raise ModelError(
            f"{found.path}: its attention.head_count is {str(heads[0])[:40]} and its "
            f"head_count_kv {str(heads[1])[:40]}, where numbers were expected: download it again"
        )
    inside = {inner: inner for inner in found.names.values()}
    weights = GgufWeights(found.path, header, inside, family, heads)
    tensors = {name: weights.floats(inner, torch.float32) for name, inner in found.names.items()}
    return tensors | ({"d2t": tensors["d2t"].long()} if "d2t" in tensors else {})


def ids_of(
    d2t: Tensor | None, count: int, found: DrafterFile, device: torch.device
) -> Tensor | None:
    """The backbone's ids of the drafter's tokens: a difference, but in llama.cpp's files."""
    if d2t is None:
        return None
    if d2t.shape != (count,):
        raise ModelError(f"{found.path}: d2t is {tuple(d2t.shape)}, ({count},) was expected")
    ids = d2t.long() if found.is_gguf else d2t.long() + torch.arange(count, device=d2t.device)
    if int(ids.min()) < 0:
        raise ModelError(f"{found.path}: d2t holds ids below 0: download it again")
    return ids.to(device)


def decoder_of(
    found: DrafterFile,
    width: int,
    tensors: Mapping[str, Tensor],
    device: torch.device,
    is_wide: Callable[[str], bool] = lambda name: False,
    may_lack: str = "",
    layer: Mapping[str, Any] | None = None,
) -> Any:
    """Stock layers of this width with the file's weights, and their rotary embedding. is_wide:
    whether a linear, by its name within the layers, reads twice the width; may_lack: a norm that
    may be missing; layer: what its config is of a layer, None for the file's. Raises
    ModelError."""
    given = found.config if layer is None else layer
    has_norms = "layers.0.self_attn.q_norm.weight" in tensors
    kind, make = (Qwen3Config, Qwen3Model) if has_norms else (LlamaConfig, LlamaModel)
    options = {key: given[key] for key in LAYER if given.get(key) is not None}
    options |= {"hidden_size": width, "bos_token_id": None, "eos_token_id": None, "vocab_size": 1}
    try:
        config = kind(**options, num_hidden_layers=found.layers)
        with torch.device("meta"):
            decoder: Any = make(config)
    except (TypeError, ValueError, ZeroDivisionError, RuntimeError) as error:
        raise ModelError(f"{found.path}: its config fits no layer: {first_line(error)}") from error
    for name, module in list(decoder.layers.named_modules()):
        weight = tensors.get(f"layers.{name}.weight")
        if weight is None:
            if hasattr(module, "weight") and f"layers.{name}" != may_lack:
                raise ModelError(f"{found.path} lacks layers.{name}.weight: download it again")
        elif isinstance(module, nn.Linear):
            expected = (module.out_features, module.in_features * (2 if is_wide(name) else 1))
            _refuse_shape(found, f"{name}.weight", weight, expected)
            bias = tensors.get(f"layers.{name}.bias")
            if bias is not None:
                _refuse_shape(found, f"{name}.bias", bias, (module.out_features,))
            own = linear(weight, bias)
            parent, _, last = name.rpartition(".")
            setattr(decoder.layers.get_submodule(parent), last, own)
        else:
            _refuse_shape(found, f"{name}.weight", weight, tuple(module.weight.shape))
            module.weight = nn.Parameter(weight, requires_grad=False)
    decoder.rotary_emb = type(decoder.rotary_emb)(config).to(device)
    return decoder


def _refuse_shape(found: DrafterFile, name: str, weight: Tensor, expected: tuple[int, ...]) -> None:
    if weight.shape != expected:
        raise ModelError(
            f"{found.path}: layers.{name} is {tuple(weight.shape)}, {expected} was "
            "expected by its config: download it again"
        )


def linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    with torch.device("meta"):
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    made.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        made.bias = nn.Parameter(bias, requires_grad=False)
    return made


def norm(weight: Tensor, eps: float) -> nn.RMSNorm:
    made = nn.RMSNorm(len(weight), eps)
    made.weight = nn.Parameter(weight, requires_grad=False)
    return made


def pack(model: nn.Module, library: NativeLibrary) -> None:
    """Let C multiply the drafter's weights, in 8 bits where their shape allows: no text depends on
    them, and a draft reads half as much."""
    packed: dict[nn.Module, NativeLinear] = {}  # one that stands in several places is packed once
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if type(module) is nn.Linear:
            if module not in packed:
                rows = StoredRows.of(module.weight) if module.in_features % INPUTS == 0 else None
                packed[module] = NativeLinear(module, library, rows)
            model.set_submodule(name, packed[module])
