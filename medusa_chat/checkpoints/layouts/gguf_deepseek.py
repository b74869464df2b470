"""DeepSeek V2 and V3 and their kin in a GGUF file: the choice of experts, and their attention.

It goes by way of one short vector (MLA). llama.cpp counts it as attention with one wide head of
keys, and splits the matrix that makes keys and values of the vector (DeepseekV2Model of its
conversion/deepseek.py); older files have it whole.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_numbers import count
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.errors import ModelError

FAMILY = "deepseek2"
TURNED_KEYS = ".attn_k_b.weight"  # of each head [vector, width], as no other matrix is
VALUES = ".attn_v_b.weight"
CHOICES = {  # model_type -> its expert_gating_func: 1 a softmax, 2 a sigmoid
    "deepseek_v2": 1,
    **dict.fromkeys(("deepseek_v3", "glm4_moe", "minimax_m2"), 2),
}
ROUTING = {  # name -> key, and what it is without
    "n_shared_experts": ("expert_shared_count", 0),
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}


def as_many_heads(header: GgufHeader) -> GgufHeader:
    """The header as if attention had as many heads of keys as of queries, each as wide as what is
    turned of it; other families' as it is."""
    told = header.metadata
    if told.get("general.architecture") != FAMILY:
        return header
    turned = told.get(f"{FAMILY}.rope.dimension_count")
    own = {"attention.head_count_kv": told.get(f"{FAMILY}.attention.head_count")}
    own |= dict.fromkeys(("attention.key_length", "attention.value_length"), turned)
    return replace(header, metadata={**told, **{f"{FAMILY}.{k}": v for k, v in own.items()}})


def routing_values(told: Mapping[str, Any], family: str, kind: str, where: str) -> dict[str, Any]:
    """How experts are chosen, in a config of these kinds; of others nothing. Raises ModelError for
    another function than the kind's."""
    usual = CHOICES.get(kind)
    if (choice := told.get(f"{family}.expert_gating_func", usual)) != usual and usual:
        raise ModelError(
            f"{where} chooses experts by the function {str(choice)[:40]}, which is not supported: "
            "take the model's safetensors"
        )
    if usual is None or kind == "minimax_m2":
        return {}
    values = {name: told.get(f"{family}.{key}", one) for name, (key, one) in ROUTING.items()}
    if kind == "deepseek_v2":
        values["topk_method"] = "greedy" if values["n_group"] == 1 else "group_limited_greedy"
    return values


def deepseek_values(header: GgufHeader, where: str) -> dict[str, Any]:
    """What the config of such a model has of its attention. Raises ModelError."""
    told, start = header.metadata, f"{FAMILY}.attention"
    turned = count(told, f"{FAMILY}.rope.dimension_count", where)
    mla = "_mla" if f"{start}.key_length_mla" in told else ""
    key = count(told, f"{start}.key_length{mla}", where)
    if key <= turned:
        raise ModelError(f"{where} has no valid {start}.key_length{mla} ({key}): fetch it again")
    return {
        "head_dim": turned,
        "kv_lora_rank": count(told, f"{start}.kv_lora_rank", where),
        "q_lora_rank": told.get(f"{start}.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": count(told, f"{start}.value_length{mla}", where),
    }


def is_split(name: str) -> bool:
    """Whether a tensor is one of the two parts of what makes keys and values."""
    return name.endswith((TURNED_KEYS, VALUES))


def whole_shape(header: GgufHeader, name: str) -> tuple[int, ...]:
    """The shape of both parts together, head by head; () where they do not fit each other."""
    layer = name.removesuffix(TURNED_KEYS).removesuffix(VALUES)
    parts = [header.tensors.get(layer + part) for part in (TURNED_KEYS, VALUES)]
    keys, values = (part.shape if part else () for part in parts)
    if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
        return ()
    return keys[0] * (keys[2] + values[1]), keys[1]
