"""Which models the C library supports, as far as their config tells. No torch."""

from collections.abc import Mapping
from typing import Any

FAMILIES = ("llama", "mistral", "qwen2", "phi3")  # whose layers are merged (fused_layers.py)
LANES = 8
WIDEST = 512  # largest head_dim
LARGEST = 16384  # largest hidden_size


def reaches(config: Mapping[str, Any]) -> bool:
    """Whether the C library supports a text model of this config: a known family with gated SiLU,
    one kind of attention layer, and a hidden size of whole vectors."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("model_type") not in FAMILIES or not hidden or not heads:
        return False
    width = config.get("head_dim") or hidden // heads
    return (
        config.get("hidden_act", "silu") == "silu"
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
