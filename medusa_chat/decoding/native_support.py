"""Reach: which models the C library decodes, as far as a config tells. No torch."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2")  # whose layers are merged (fused_layers.py)
FIXED_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not follow the length
LANES = 8
WIDEST = 512  # of an attention head
LARGEST = 16384  # of a hidden state


def reaches(config: Mapping[str, Any]) -> bool:
    """A text model's config: a known family with gated SiLU, one kind of attention layer, rotary
    angles that do not follow the text's length, states of whole vectors."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("model_type") not in FAMILIES or not hidden or not heads:
        return False
    width = config.get("head_dim") or hidden // heads
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return (
        config.get("hidden_act", "silu") == "silu"
        and kind in FIXED_ROPES
        and not _is_mixed(config)
        and hidden % LANES == 0
        and hidden <= LARGEST
        and width % 2 == 0
        and width <= WIDEST
    )


def _is_mixed(config: Mapping[str, Any]) -> bool:
    """Whether some layers have an attention window and some have none."""
    kinds = config.get("layer_types")
    if kinds:
        return len(set(kinds)) > 1
    windowed = config.get("use_sliding_window") and config.get("sliding_window")
    whole = config.get("max_window_layers", 28)  # so many first layers of Qwen2 have none
    layers = config.get("num_hidden_layers") or 0
    return bool(config.get("model_type") == "qwen2" and windowed and 0 < whole < layers)
