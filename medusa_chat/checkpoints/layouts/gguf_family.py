"""What a family of GGUF files has of its own: its class in transformers, and values of its config.

The rules are those of llama.cpp's conversion/ and src/models/.
"""

from collections.abc import Mapping
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_deepseek import deepseek_values, routing_values
from medusa_chat.checkpoints.layouts.gguf_gemma4 import gemma4_values
from medusa_chat.checkpoints.layouts.gguf_names import TEXT_PARTS
from medusa_chat.checkpoints.layouts.gguf_numbers import count, positive
from medusa_chat.checkpoints.layouts.gguf_types import GgufHeader
from medusa_chat.errors import ModelError

CLASSES = {  # model_type and class in transformers, by the family's name in a GGUF file
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM"),
    "granite": ("granite", "GraniteForCausalLM"),
    "granitemoe": ("granitemoe", "GraniteMoeForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "gemma4": ("gemma4_text", "Gemma4ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
    "glm4": ("glm4", "Glm4ForCausalLM"),
    "glm4moe": ("glm4_moe", "Glm4MoeForCausalLM"),
    "deepseek2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "minimax-m2": ("minimax_m2", "MiniMaxM2ForCausalLM"),
    "olmo2": ("olmo2", "Olmo2ForCausalLM"),
    "olmoe": ("olmoe", "OlmoeForCausalLM"),
    "exaone4": ("exaone4", "Exaone4ForCausalLM"),
    "command-r": ("cohere", "CohereForCausalLM"),
    "cohere2": ("cohere2", "Cohere2ForCausalLM"),
    "seed_oss": ("seed_oss", "SeedOssForCausalLM"),
    "gpt-oss": ("gpt_oss", "GptOssForCausalLM"),
    "ernie4_5": ("ernie4_5", "Ernie4_5ForCausalLM"),
    "hunyuan-dense": ("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM"),
}
VARIANTS = (  # another class where a file of the family has this key
    ("llama", "expert_count", ("mixtral", "MixtralForCausalLM")),
    ("llama", "attention.sliding_window", ("mistral", "MistralForCausalLM")),
    ("mistral3", "attention.temperature_scale", ("ministral3", "Ministral3ForCausalLM")),
    ("olmo2", "attention.sliding_window", ("olmo3", "Olmo3ForCausalLM")),
)
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}
CHOSEN = ("expert_count", "expert_gating_func", "expert_weights_scale")
READ = {  # keys that are read for these families alone
    "llama": ("expert_count",),
    "qwen2moe": ("expert_count",),
    "qwen3moe": ("expert_count",),
    "olmoe": ("expert_count",),
    "gpt-oss": ("expert_count",),
    "gemma4": ("expert_count",),
    "glm4moe": (*CHOSEN, "rope.dimension_sections"),
    "minimax-m2": CHOSEN,
    "deepseek2": (*CHOSEN, "rope.scaling.yarn_log_multiplier"),
    "granite": tuple(MULTIPLIERS.values()),
    "granitemoe": ("expert_count", *MULTIPLIERS.values()),
    "command-r": ("logit_scale",),
    "cohere2": ("logit_scale",),
    "mistral3": ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    # which turns by three positions that are one for each token of a text
    **dict.fromkeys(TEXT_PARTS, ("expert_count", "rope.dimension_sections")),
}
CENTRED = ("command-r", "cohere2")  # families whose norms subtract the mean
WINDOWED = ("mistral", "phi3", "gemma2", "gemma3_text", "gpt_oss")
MIXED = ("olmo3", "cohere2", "exaone4", "gemma4_text")  # every fourth layer has none, or as is told
BIASES = {  # by the tensor that tells whether there are some
    "attention_bias": "blk.0.attn_q.bias",
    "attention_out_bias": "blk.0.attn_output.bias",
    "mlp_bias": "blk.0.ffn_down.bias",
}
BIASED = {  # which of them a family's config has
    **dict.fromkeys(("llama", "smollm3", "granite"), ("attention_bias", "mlp_bias")),
    **dict.fromkeys(("granitemoe", "glm4", "glm4_moe", "olmo2", "olmoe"), ("attention_bias",)),
    **dict.fromkeys(("cohere", "cohere2"), ("attention_bias",)),
    "seed_oss": tuple(BIASES),
}
EXPERTS = {  # model_type -> its name for the count of experts
    **dict.fromkeys(("mixtral", "granitemoe", "gpt_oss", "minimax_m2"), "num_local_experts"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), "num_experts"),
    **dict.fromkeys(("glm4_moe", "deepseek_v2", "deepseek_v3"), "n_routed_experts"),
}
NARROW = {  # widths of one expert, and of the one that every token has
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
NARROWED = ("qwen3_moe", "glm4_moe", "deepseek_v2", "deepseek_v3")
WIDTHS = {"qwen2_moe": tuple(NARROW), **dict.fromkeys(NARROWED, tuple(NARROW)[:1])}
# layers of the 27B, which alone scale queries otherwise
LARGEST = {"gemma2": 46, "gemma3_text": 62}


def class_of(header: GgufHeader, family: str) -> tuple[str, str]:
    """model_type and class in transformers of a file of a family."""
    for name, key, found in VARIANTS:
        if name == family and header.metadata.get(f"{family}.{key}"):
            return found
    if family == "deepseek2" and any("exp_probs_b" in name for name in header.tensors):
        return "deepseek_v3", "DeepseekV3ForCausalLM"
    return CLASSES[TEXT_PARTS.get(family, family)]


def own_values(
    header: GgufHeader, family: str, kind: str, config: Mapping[str, int], width: int, where: str
) -> dict[str, Any]:
    """What only a config of this kind, its model_type, has. width: numbers of an attention head.
    Raises ModelError."""
    metadata = header.metadata
    values: dict[str, Any] = {} if kind == "phi3" else {"head_dim": width}
    values |= {name: BIASES[name] in header.tensors for name in BIASED.get(kind, ())}
    values |= _windows(metadata, family, kind, config["num_hidden_layers"], where)
    if kind == "gemma4_text":
        values |= gemma4_values(header, values.get("layer_types", []), where)
    if kind in EXPERTS:
        values[EXPERTS[kind]] = count(metadata, f"{family}.expert_count", where)
        values["num_experts_per_tok"] = count(metadata, f"{family}.expert_used_count", where)
    for name in WIDTHS.get(kind, ()):
        values[name] = count(metadata, f"{family}.{NARROW[name]}", where)
    if kind == "qwen3_moe":
        values["norm_topk_prob"] = True
    values |= routing_values(metadata, family, kind, where)
    if kind == "glm4_moe":
        values["use_qk_norm"] = "blk.0.attn_q_norm.weight" in header.tensors
    if family == "deepseek2":
        values |= deepseek_values(header, where)
    if family in ("granite", "granitemoe"):
        _refuse_unturned(metadata, family, where)
        for name, key in MULTIPLIERS.items():
            values[name] = positive(metadata, f"{family}.{key}", None, where)
    if family in ("command-r", "cohere2"):
        values["logit_scale"] = positive(metadata, f"{family}.logit_scale", None, where)
    start = metadata.get("phi3.rope.scaling.original_context_length")
    if kind == "phi3" and type(start) is int and start > 0:
        values |= {"original_max_position_embeddings": start}
    if kind in LARGEST:
        large = config["num_hidden_layers"] == LARGEST[kind]
        scale = config["hidden_size"] // config["num_attention_heads"] if large else width
        caps = ("attn_logit_softcapping", "final_logit_softcapping")
        said = {key: metadata[f"{family}.{key}"] for key in caps if f"{family}.{key}" in metadata}
        values |= {"query_pre_attn_scalar": scale} | said
    return values


def _windows(
    metadata: Mapping[str, Any], family: str, kind: str, layers: int, where: str
) -> dict[str, Any]:
    """Tokens that a layer with a window reads, and which layers have one where some have none."""
    window = metadata.get(f"{family}.attention.sliding_window")
    window = window if type(window) is int and window > 0 else None
    if kind not in WINDOWED + MIXED or (window is None and kind.startswith("gemma")):
        return {}
    if kind not in MIXED:
        return {"sliding_window": window}
    pattern = metadata.get(f"{family}.attention.sliding_window_pattern", 4)
    if type(pattern) is int and pattern > 0:
        pattern = [(layer + 1) % pattern != 0 for layer in range(layers)]
    if not isinstance(pattern, list) or len(pattern) != layers:
        raise ModelError(f"{where} has no valid {family}.attention.sliding_window_pattern")
    kinds = ["sliding_attention" if near and window else "full_attention" for near in pattern]
    return {"sliding_window": window, "layer_types": kinds}


def _refuse_unturned(metadata: Mapping[str, Any], family: str, where: str) -> None:
    """Granite says so that its attention reads no positions."""
    if metadata.get(f"{family}.rope.scaling.finetuned") is False:
        raise ModelError(
            f"{where} has no rotary embedding, which is not supported: take the model's safetensors"
        )
