"""Gemma 4 in a GGUF file: layers of two kinds, of which most have a window.

llama.cpp writes a number for each layer where they differ (Gemma4Model of its conversion/gemma.py);
a config of transformers has those of the layers with a window, and others for those without.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_numbers import count
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.errors import ModelError

FAMILY = "gemma4"
BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
WINDOWED = ("attention.key_length", "attention.value_length", "rope.dimension_count")
SHARED = f"{FAMILY}.attention.shared_kv_layers"
KEYS_AND_VALUES = ("attn_k", "attn_v", "attn_k_norm")


def as_first_layer(header: GgufHeader) -> GgufHeader:
    """The header as if every layer were the first, which has a window; other families' as it is."""
    told = header.metadata
    if told.get("general.architecture") != FAMILY:
        return header
    lists = {key: told.get(f"{FAMILY}.{key}") for key in BY_LAYER}
    first = {key: value[0] for key, value in lists.items() if isinstance(value, list) and value}
    near = {key: told.get(f"{FAMILY}.{key}_swa") for key in WINDOWED}
    first |= {key: value for key, value in near.items() if value is not None}
    return replace(header, metadata={**told, **{f"{FAMILY}.{k}": v for k, v in first.items()}})


def is_unread(header: GgufHeader, layer: int, tensor: str) -> bool:
    """Whether it would make keys or values of a layer that reads those of one before it: a file may
    hold what the model was trained with, and neither llama.cpp nor transformers reads it."""
    layers, shared = header.metadata.get(f"{FAMILY}.block_count"), header.metadata.get(SHARED)
    if tensor not in KEYS_AND_VALUES or type(layers) is not int or type(shared) is not int:
        return False
    return layer >= layers - shared


def gemma4_values(header: GgufHeader, kinds: list[str], where: str) -> dict[str, Any]:
    """What the config of a Gemma 4 has beside that of its layers with a window. kinds: of each
    layer. Raises ModelError."""
    told, tensors = header.metadata, header.tensors
    if "full_attention" not in kinds or kinds[0] == "full_attention":
        raise ModelError(
            f"{where} has not two kinds of layers, the first with a window: fetch it again"
        )
    whole, inputs = kinds.index("full_attention"), tensors.get("per_layer_token_embd.weight")
    heads, widths = (_numbers(told, f"{FAMILY}.{key}", len(kinds), where) for key in BY_LAYER)
    values = {
        "global_head_dim": count(told, f"{FAMILY}.attention.key_length", where),
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in tensors,
        "num_global_key_value_heads": heads[whole],
        "num_kv_shared_layers": told.get(SHARED, 0),
        "use_double_wide_mlp": widths[-1] > widths[0],
        "hidden_size_per_layer_input": told.get(f"{FAMILY}.embedding_length_per_layer_input", 0),
        "enable_moe_block": bool(told.get(f"{FAMILY}.expert_count")),
        "final_logit_softcapping": told.get(f"{FAMILY}.final_logit_softcapping"),
    }
    if inputs is not None:
        values["vocab_size_per_layer_input"] = inputs.shape[0]
    if values["enable_moe_block"]:
        values |= {
            "num_experts": count(told, f"{FAMILY}.expert_count", where),
            "top_k_experts": count(told, f"{FAMILY}.expert_used_count", where),
            "moe_intermediate_size": count(told, f"{FAMILY}.expert_feed_forward_length", where),
        }
    return values


def _numbers(told: Mapping[str, Any], key: str, layers: int, where: str) -> list[int]:
    """One for each layer. Raises ModelError."""
    value = told.get(key)
    if isinstance(value, list) and len(value) != layers:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    values = value if isinstance(value, list) else [value] * layers
    return [count({key: one}, key, where) for one in values]
