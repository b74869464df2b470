"""Text part: the language model inside a vision-language checkpoint, which is loaded alone."""

import re
from collections.abc import Mapping
from typing import Any

# text parts that transformers has as models of their own, though they are named after the whole
ALONE = ("gemma3_text", "gemma3n_text", "gemma4_text", "gemma4_unified_text")
# text parts -> the model with the same tensors. Its rotary angles are the same too: theirs use
# three positions (time, height and width), which are equal for every text token
TWINS = {
    "qwen2_vl": "qwen2",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
}
FIXED = {"qwen3_moe": {"norm_topk_prob": True}}  # what the text part does whatever its config says
BOTH_WAYS = ("paligemma",)  # families with bidirectional attention in prompts: no KV cache
# values that such configs leave out, since they are the text part's defaults
DEFAULTS: dict[str, dict[str, Any]] = {
    "glm4v_text": {"rms_norm_eps": 1e-5},
    "glm4v_moe_text": {"attention_bias": True},
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    },
    "llama": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 11_008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mistral": {
        "vocab_size": 32_000,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
    },
}
# names in the files -> names in the text part as a model of its own
NAMES = {
    r"^(?:model\.)?(?:language_model|text_model)\.(?:model\.)?(?!lm_head)": "model.",
    r"^(?:model\.)?language_model\.lm_head": "lm_head",
}


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model inside a vision-language model's config.json; any other
    config, or that of a family without such a part, unchanged."""
    family, inner = str(config.get("model_type")), config.get("text_config")
    if not isinstance(inner, dict):  # Qwen2-VL's are flat
        is_flat = family in TWINS and "vision_config" in config
        inner = {k: v for k, v in config.items() if k != "vision_config"} if is_flat else {}
    kind = str(inner.get("model_type", ""))
    is_model = kind in (*ALONE, *TWINS) or (kind != "" and "_text" not in kind)
    if not is_model or family in BOTH_WAYS:
        return config
    outer = {key: config.get(key) for key in ("dtype", "torch_dtype")}
    if isinstance(quantised := config.get("quantization_config"), dict):
        outer["quantization_config"] = {key: _of_part(v) for key, v in quantised.items()}
    tied = [part.get("tie_word_embeddings") for part in (config, inner)]
    ties = {"tie_word_embeddings": any(tied)} if tied != [None, None] else {}
    ropes = {key: _plain(inner[key]) for key in ("rope_scaling", "rope_parameters") if key in inner}
    return {
        **DEFAULTS.get(kind, {}),
        **inner,
        **{k: v for k, v in outer.items() if v is not None},
        **ties,
        **ropes,
        **(FIXED.get(TWINS.get(kind, ""), {})),
        "model_type": TWINS.get(kind, kind),
    }


def name_of(module: str) -> str:
    """The name in the text part of a module or tensor of the whole model."""
    for pattern, name in NAMES.items():
        module = re.sub(pattern, name, module)
    return module


def _of_part(value: Any) -> Any:
    """A list of modules (that were not quantised) with their names in the text part."""
    if not isinstance(value, list):
        return value
    return [name_of(one) if isinstance(one, str) else one for one in value]


def _plain(rope: Any) -> Any:
    """Rotary parameters without those for image positions."""
    if not isinstance(rope, dict):
        return rope
    kept = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in kept.items()}
