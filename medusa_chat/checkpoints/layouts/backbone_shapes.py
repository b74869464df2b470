"""Whether the tensors of a backbone's files are those that its config asks for, by headers."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.entry import REMEDY, Entry
from medusa_chat.errors import ModelError

LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d{1,5})\.")
QUANTISED = "quantization_config"
EMBEDDINGS = "embed_tokens.weight"
KNOWN = ("llama", "mistral", "qwen2")  # families whose tensors follow from the config
NUMBERS = (
    *("hidden_size", "vocab_size", "intermediate_size", "num_attention_heads"),
    "num_hidden_layers",
)
MOST_LAYERS = 10_000


def refuse_misfits(header: Mapping[str, Entry], config: Mapping[str, Any], where: str) -> None:
    """header: of all files of the model. Raises ModelError for a layer that is missing and, in the
    families that are known, for any tensor that is missing or of another shape. A quantised model
    stores its weights otherwise: only its layers are counted."""
    _refuse_missing_layers(header, config.get("num_hidden_layers"), where)
    if not are_known(config) or config.get(QUANTISED):
        return
    starts = [name.removesuffix(EMBEDDINGS) for name in header if name.endswith(EMBEDDINGS)]
    if len(starts) != 1:
        return  # several models in one; without any, the layers were counted
    for name, shape in _expected(config):
        outer = name == "lm_head.weight"
        found = _outer(header, name) if outer else header.get(starts[0] + name)
        if found is None:
            whole = name if outer else starts[0] + name
            raise ModelError(f"the weights in {where} lack {whole}: it is incomplete, {REMEDY}")
        if found.shape != shape:
            raise ModelError(
                f"{where}: tensor {name} is {found.shape}, config.json says {shape}: {REMEDY}"
            )


def are_known(config: Mapping[str, Any]) -> bool:
    """Whether the shapes of all tensors follow from a config."""
    has_numbers = all(type(config.get(key)) is int for key in NUMBERS)
    return config.get("model_type") in KNOWN and has_numbers


def _outer(header: Mapping[str, Entry], name: str) -> Entry | None:
    """A tensor that stands beside the layers, whatever is before its name."""
    return next((e for n, e in header.items() if n == name or n.endswith(f"model.{name}")), None)


def _refuse_missing_layers(header: Mapping[str, Entry], count: object, where: str) -> None:
    found = {int(match[1]) for name in header if (match := LAYER.search(name))}
    if type(count) is not int or not found or count > MOST_LAYERS:
        return
    if missing := set(range(count)) - found:
        raise ModelError(
            f"{where} lacks layer {min(missing)} of {count}: it is incomplete, {REMEDY}"
        )


def _expected(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name, shape) of the tensors of a known family."""
    hidden, rows, inner = (config[k] for k in ("hidden_size", "vocab_size", "intermediate_size"))
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or hidden // heads
    few = (config.get("num_key_value_heads") or heads) * width
    yield EMBEDDINGS, (rows, hidden)
    yield "norm.weight", (hidden,)
    if not config.get("tie_word_embeddings"):
        yield "lm_head.weight", (rows, hidden)
    for layer in range(config["num_hidden_layers"]):
        inside = {
            "self_attn.q_proj": (heads * width, hidden),
            "self_attn.k_proj": (few, hidden),
            "self_attn.v_proj": (few, hidden),
            "self_attn.o_proj": (hidden, heads * width),
            "mlp.gate_proj": (inner, hidden),
            "mlp.up_proj": (inner, hidden),
            "mlp.down_proj": (hidden, inner),
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
        }
        for name, shape in inside.items():
            yield f"layers.{layer}.{name}.weight", shape
