"""The config of a GGUF model as transformers has it, from the metadata of the file.

We need to know whether a model fits before any package is imported, and transformers 5.23 ignores
a head's width, attention windows and rotary scaling in the file. The rules for each family are
those of llama.cpp's conversion/ and src/models/.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_header import (
    TOKENS,
    GgufHeader,
    count,
    layers_of,
    positive,
)
from medusa_chat.checkpoints.layouts.gguf_names import GEMMA4, GEMMA4_SHARED, INSIDE, TEXT_PARTS
from medusa_chat.checkpoints.layouts.gguf_rope import rope_parameters
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError

COUNTS = {
    "hidden_size": "embedding_length",
    "num_attention_heads": "attention.head_count",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
}
SMALLEST_LAYER = 6  # tensors of it, phi3's
IDS = {"bos": "bos", "eos": "eos", "pad": "padding"}
ENDS = ("eos", "eot", "eom")
# what changes the arithmetic and is not read; a family that has it is written under another name
UNREAD = (
    *("expert_count", "attention.scale", "logit_scale", "residual_scale", "embedding_scale"),
    *("expert_gating_func", "expert_weights_scale", "attention.temperature_scale"),
    *("attention.clamp_kqv", "attention.max_alibi_bias", "rope.dimension_sections"),
    "rope.scaling.yarn_log_multiplier",
)


def family_of(header: GgufHeader, where: str) -> str:
    """The family's name in a GGUF file. Raises ModelError for one that is not read."""
    family = header.metadata.get("general.architecture")
    if family not in INSIDE:
        known = ", ".join(INSIDE)
        raise ModelError(
            f"{where} is of the family {str(family)[:40]!r}, and {known} are supported: take the "
            "model's safetensors"
        )
    return str(family)


def gguf_config(header: GgufHeader, source: Source, file: str) -> dict[str, Any]:
    """The values of its config.json. Raises ModelError for what is missing or out of range."""
    where = f"{source.name}/{file}"
    family = family_of(header, where)
    whole, header = header, as_many_heads(as_first_layer(header))
    metadata = header.metadata
    for key in UNREAD:
        if metadata.get(f"{family}.{key}") and key not in READ.get(family, ()):
            raise ModelError(
                f"{where} has {family}.{key}, which is not supported: take the model's safetensors"
            )
    config = {ours: count(metadata, f"{family}.{key}", where) for ours, key in COUNTS.items()}
    config["num_hidden_layers"] = layers_of(metadata, family, where)
    if config["num_hidden_layers"] > len(header.tensors) // SMALLEST_LAYER:
        raise ModelError(f"{where} has fewer tensors than {family}.block_count: download it again")
    heads = config["num_attention_heads"]
    width = _width(metadata, family, config["hidden_size"] // heads, where)
    kind, name = class_of(header, family)
    few = count(metadata, f"{family}.attention.head_count_kv", where, heads)
    return config | {
        "model_type": kind,
        "architectures": [name],
        "num_key_value_heads": few,
        **_epsilon(metadata, family, where),
        "vocab_size": _rows(header, where),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "rope_parameters": rope_parameters(header, family, kind, width, source, file),
        **{f"{o}_token_id": metadata.get(f"tokenizer.ggml.{k}_token_id") for o, k in IDS.items()},
        **own_values(whole, family, kind, config, width, where),
    }


def end_tokens(header: GgufHeader) -> list[int]:
    """Every id that ends a turn, the usual one first."""
    found = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ENDS]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _epsilon(metadata: Mapping[str, Any], family: str, where: str) -> dict[str, float]:
    ours, theirs = ("layer_norm_eps", "") if family in CENTRED else ("rms_norm_eps", "rms_")
    key = f"{family}.attention.layer_norm_{theirs}epsilon"
    value = metadata.get(key)
    if type(value) is not float or not 0 <= value < 1:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): download it again")
    return {ours: value}


def _width(metadata: Mapping[str, Any], family: str, usual: int, where: str) -> int:
    """Numbers of an attention head, in keys and values alike."""
    known = f"{family}.attention.key_length"
    key = known if known in metadata or family != "llama" else "llama.rope.dimension_count"
    width = count(metadata, key, where, max(usual, 1))
    if metadata.get(f"{family}.attention.value_length", width) != width:
        raise ModelError(
            f"{where} has keys of {width} numbers and values of another width, which is not "
            "supported: take the model's safetensors"
        )
    return width


def _rows(header: GgufHeader, where: str) -> int:
    """Rows of the embeddings: tokens, and what pads them."""
    table = header.tensors.get("token_embd.weight")
    rows = table.shape[0] if table else 0
    if rows < header.metadata[TOKENS]:
        raise ModelError(
            f"{where} has embeddings for {rows} tokens and a vocabulary of "
            f"{header.metadata[TOKENS]}: download it again"
        )
    return rows


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


DEEPSEEK = "deepseek2"
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
    if told.get("general.architecture") != DEEPSEEK:
        return header
    turned = told.get(f"{DEEPSEEK}.rope.dimension_count")
    own = {"attention.head_count_kv": told.get(f"{DEEPSEEK}.attention.head_count")}
    own |= dict.fromkeys(("attention.key_length", "attention.value_length"), turned)
    return replace(header, metadata={**told, **{f"{DEEPSEEK}.{k}": v for k, v in own.items()}})


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
    told, start = header.metadata, f"{DEEPSEEK}.attention"
    turned = count(told, f"{DEEPSEEK}.rope.dimension_count", where)
    mla = "_mla" if f"{start}.key_length_mla" in told else ""
    key = count(told, f"{start}.key_length{mla}", where)
    if key <= turned:
        raise ModelError(f"{where} has no valid {start}.key_length{mla} ({key}): download it again")
    return {
        "head_dim": turned,
        "kv_lora_rank": count(told, f"{start}.kv_lora_rank", where),
        "q_lora_rank": told.get(f"{start}.q_lora_rank"),
        "qk_rope_head_dim": turned,
        "qk_nope_head_dim": key - turned,
        "v_head_dim": count(told, f"{start}.value_length{mla}", where),
    }


GEMMA4_BY_LAYER = ("attention.head_count_kv", "feed_forward_length")
GEMMA4_WINDOWED = ("attention.key_length", "attention.value_length", "rope.dimension_count")


def as_first_layer(header: GgufHeader) -> GgufHeader:
    """The header as if every layer were the first, which has a window; other families' as it is."""
    told = header.metadata
    if told.get("general.architecture") != GEMMA4:
        return header
    lists = {key: told.get(f"{GEMMA4}.{key}") for key in GEMMA4_BY_LAYER}
    first = {key: value[0] for key, value in lists.items() if isinstance(value, list) and value}
    near = {key: told.get(f"{GEMMA4}.{key}_swa") for key in GEMMA4_WINDOWED}
    first |= {key: value for key, value in near.items() if value is not None}
    return replace(header, metadata={**told, **{f"{GEMMA4}.{k}": v for k, v in first.items()}})


def gemma4_values(header: GgufHeader, kinds: list[str], where: str) -> dict[str, Any]:
    """What the config of a Gemma 4 has beside that of its layers with a window. kinds: of each
    layer. Raises ModelError."""
    told, tensors = header.metadata, header.tensors
    if "full_attention" not in kinds or kinds[0] == "full_attention":
        raise ModelError(
            f"{where} has not two kinds of layers, the first with a window: download it again"
        )
    whole, inputs = kinds.index("full_attention"), tensors.get("per_layer_token_embd.weight")
    heads, widths = (
        _numbers(told, f"{GEMMA4}.{key}", len(kinds), where) for key in GEMMA4_BY_LAYER
    )
    values = {
        "global_head_dim": count(told, f"{GEMMA4}.attention.key_length", where),
        "attention_k_eq_v": f"blk.{whole}.attn_v.weight" not in tensors,
        "num_global_key_value_heads": heads[whole],
        "num_kv_shared_layers": told.get(GEMMA4_SHARED, 0),
        "use_double_wide_mlp": widths[-1] > widths[0],
        "hidden_size_per_layer_input": told.get(f"{GEMMA4}.embedding_length_per_layer_input", 0),
        "enable_moe_block": bool(told.get(f"{GEMMA4}.expert_count")),
        "final_logit_softcapping": told.get(f"{GEMMA4}.final_logit_softcapping"),
    }
    if inputs is not None:
        values["vocab_size_per_layer_input"] = inputs.shape[0]
    if values["enable_moe_block"]:
        values |= {
            "num_experts": count(told, f"{GEMMA4}.expert_count", where),
            "top_k_experts": count(told, f"{GEMMA4}.expert_used_count", where),
            "moe_intermediate_size": count(told, f"{GEMMA4}.expert_feed_forward_length", where),
        }
    return values


def _numbers(told: Mapping[str, Any], key: str, layers: int, where: str) -> list[int]:
    """One for each layer. Raises ModelError."""
    value = told.get(key)
    if isinstance(value, list) and len(value) != layers:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): download it again")
    values = value if isinstance(value, list) else [value] * layers
    return [count({key: one}, key, where) for one in values]
