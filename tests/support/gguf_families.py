"""Tiny random models of the families of GGUF files, and what llama.cpp's converter makes of them.

The rules are those of its conversion/*.py, one by one, so that they are independent of ours.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import gguf
import torch
import transformers

from support.families import BY_POSITION, COMMON, YARN, tiny

WINDOWED = {"sliding_window": 16, "num_hidden_layers": 5}
NO_WINDOW = {"sliding_window": None, "layer_types": ["full_attention"] * 2}
FEW = {"num_experts_per_tok": 2}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LATENT = FEW | {
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 32,
    "v_head_dim": 16,
}
SCALES = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}
OLMO3 = {"full_attention": YARN | {"attention_factor": 1.2}, "sliding_attention": None}
OLMO3["sliding_attention"] = {"rope_type": "default", "rope_theta": 10_000.0}
MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # model_type -> class, and its config
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {}),
    "smollm3": ("SmolLM3", {"num_hidden_layers": 5}),
    "granite": ("Granite", SCALES),
    "granitemoe": ("GraniteMoe", SCALES | FEW | {"num_local_experts": 4}),
    "mixtral": ("Mixtral", FEW | {"num_local_experts": 4, "head_dim": 8}),
    "qwen3_moe": (
        "Qwen3Moe",
        FEW
        | {"num_experts": 4, "moe_intermediate_size": 32, "norm_topk_prob": True, "head_dim": 16},
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        FEW
        | {
            "num_experts": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 96,
        },
    ),
    "olmo2": ("Olmo2", {}),
    "olmo3": ("Olmo3", WINDOWED | {"rope_parameters": OLMO3}),
    "olmoe": ("Olmoe", FEW | {"num_experts": 4}),
    "cohere": ("Cohere", {"tie_word_embeddings": True, "logit_scale": 3.0}),
    "cohere2": ("Cohere2", WINDOWED | {"tie_word_embeddings": True, "logit_scale": 3.0}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "glm4_moe": (
        "Glm4Moe",
        FEW
        | {"n_routed_experts": 4, "moe_intermediate_size": 32, "head_dim": 16, "use_qk_norm": True}
        | {"routed_scaling_factor": 1.5, "num_hidden_layers": 3, "attention_bias": True},
    ),
    "deepseek_v2": ("DeepseekV2", LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT
        | {"q_lora_rank": 32, "n_group": 2, "topk_group": 1, "norm_topk_prob": True}
        | {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "minimax_m2": (
        "MiniMaxM2",
        FEW | {"num_local_experts": 4, "head_dim": 16, "rope_parameters": HALF},
    ),
    "exaone4": ("Exaone4", {"head_dim": 16} | NO_WINDOW),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "gpt_oss": (
        "GptOss",
        FEW
        | {"num_local_experts": 4, "head_dim": 16, "sliding_window": 8, "num_hidden_layers": 3}
        | {"rope_parameters": YARN | {"truncate": False}},
    ),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "hunyuan_v1_dense": ("HunYuanDenseV1", {"head_dim": 16, "tie_word_embeddings": True}),
    "ministral3": ("Ministral3", {"head_dim": 16, "rope_parameters": YARN | BY_POSITION}),
}
# general.architecture, where it is not the model_type
NAMES = {
    **{"gemma3_text": "gemma3", "mistral": "llama", "mixtral": "llama", "ministral3": "mistral3"},
    **{"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmo3": "olmo2", "cohere": "command-r"},
    **{"gpt_oss": "gpt-oss", "hunyuan_v1_dense": "hunyuan-dense"},
}
NAMES |= dict.fromkeys(("deepseek_v2", "deepseek_v3"), "deepseek2")
NAMES |= {"gemma4_text": "gemma4", "glm4_moe": "glm4moe", "minimax_m2": "minimax-m2"}
LLAMAS = ("llama", "mistral3", "smollm3", "granite", "granitemoe")  # kin of LlamaModel


def tiny_of(family: str, values: Mapping[str, Any]) -> Any:
    """A random model in fp32. values: of its config, over its own."""
    if family not in MODELS:
        return tiny(family, **values)
    name, own = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**COMMON | dict(own) | dict(values))
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    return model.eval().requires_grad_(False)


def own_keys(writer: gguf.GGUFWriter, name: str, config: Any) -> None:
    """The metadata that not every family has. name: general.architecture."""
    if (window := getattr(config, "sliding_window", None)) and name not in (
        "smollm3",
        "qwen2moe",
        "qwen3moe",
    ):
        writer.add_sliding_window(window)
    if name in ("olmo2", "exaone4") and window:
        kinds = config.layer_types
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    if name in ("command-r", "cohere2"):
        writer.add_logit_scale(config.logit_scale)
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)
    if name.startswith("granite"):
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if count := getattr(config, "num_local_experts", getattr(config, "num_experts", None)):
        writer.add_expert_count(count)
        writer.add_expert_used_count(getattr(config, "num_experts_per_tok", 1))
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if name in ("qwen2moe", "qwen3moe", "qwen3vlmoe"):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name == "qwen2moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "gemma4":
        _gemma4(writer, config)
    if name == "deepseek2":
        _deepseek2(writer, config)
    if name in ("glm4moe", "deepseek2"):
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if config.model_type in ("glm4_moe", "minimax_m2", "deepseek_v3"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    _rope(writer, config.rope_parameters)


def _deepseek2(writer: gguf.GGUFWriter, config: Any) -> None:
    """DeepseekV2Model.set_gguf_parameters of conversion/deepseek.py."""
    turned, vector = config.qk_rope_head_dim, config.kv_lora_rank
    writer.add_head_count_kv(1)
    if config.q_lora_rank:
        writer.add_q_lora_rank(config.q_lora_rank)
    writer.add_kv_lora_rank(vector)
    writer.add_key_length(vector + turned)
    writer.add_value_length(vector)
    writer.add_key_length_mla(config.qk_nope_head_dim + turned)
    writer.add_value_length_mla(config.v_head_dim)
    writer.add_rope_dimension_count(turned)
    writer.add_expert_group_count(config.n_group)
    writer.add_expert_group_used_count(config.topk_group)
    if "mscale_all_dim" in config.rope_parameters:
        writer.add_rope_scaling_yarn_log_mul(0.1 * config.rope_parameters["mscale_all_dim"])


def _gemma4(writer: gguf.GGUFWriter, config: Any) -> None:
    """Gemma4Model.set_gguf_parameters of conversion/gemma.py."""
    kinds, shared = config.layer_types, config.num_kv_shared_layers
    near, *_ = layers = config.per_layer_config
    whole = layers[kinds.index("full_attention")]
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in kinds])
    for add, width in (
        *((writer.add_key_length, whole.head_dim), (writer.add_value_length, whole.head_dim)),
        (writer.add_key_length_swa, near.head_dim),
        (writer.add_value_length_swa, near.head_dim),
        (writer.add_rope_dimension_count, whole.head_dim),
        (writer.add_rope_dimension_count_swa, near.head_dim),
    ):
        add(width)
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if config.num_experts:
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.use_double_wide_mlp:
        width, first = config.intermediate_size, len(kinds) - shared
        writer.add_feed_forward_length([width] * first + [2 * width] * shared)
    if whole.num_key_value_heads != near.num_key_value_heads:
        writer.add_head_count_kv([layer.num_key_value_heads for layer in layers])


def _rope(writer: gguf.GGUFWriter, rope: Mapping[str, Any]) -> None:
    near = rope.get("sliding_attention", {}).get("rope_theta")
    rope = rope.get("full_attention", rope)
    writer.add_rope_freq_base(rope["rope_theta"])
    if near is not None:
        writer.add_rope_freq_base_swa(near)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if "llama_4_scaling_beta" in rope:
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def as_published(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that the converter hands to its table of names: experts stacked, the gates of all
    apart from their ups."""
    where, _, kind = name.rpartition(".")
    where = where.replace("block_sparse_moe", "mlp")
    if kind == "gate_up_proj":
        gate, up = tensor.chunk(2, dim=1)
        yield f"{where}.gate_proj.weight", gate
        yield f"{where}.up_proj.weight", up
    elif where.endswith("experts"):
        yield f"{where}.{kind}.weight", tensor
    elif kind == "e_score_correction_bias":
        published = where if where.endswith("gate") else where.replace("mlp", "block_sparse_moe")
        yield f"{published}.e_score_correction.bias", tensor
    elif where.endswith("shared_expert_gate"):
        yield name, tensor.squeeze()
    elif where.endswith("mlp.router"):
        yield f"{where.removesuffix('router')}gate.{kind}", tensor
    else:
        yield name, tensor


def as_gemma4(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of Gemma 4, two of whose tensors are named by the converter itself."""
    own = {"router.scale": "ffn_gate_inp.scale", "router.per_expert_scale": "ffn_down_exps.scale"}
    start, _, end = name.partition("router.")
    layer = start.removeprefix("model.layers.").removesuffix(".")
    if f"router.{end}" in own:
        yield f"blk.{layer}.{own[f'router.{end}']}", tensor
    else:
        yield name + ("" if name.endswith("weight") else ".weight"), tensor


def as_deepseek2(
    config: Any, name: str, tensor: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of DeepSeek, whose keys and values are split."""
    if not name.endswith("kv_b_proj.weight"):
        yield from as_published(name, tensor)
        return
    heads = tensor.unflatten(0, (config.num_attention_heads, -1))
    keys, values = heads.split([config.qk_nope_head_dim, config.v_head_dim], dim=1)
    yield name.replace("kv_b_proj", "k_b_proj"), keys.transpose(1, 2)
    yield name.replace("kv_b_proj", "v_b_proj"), values


def as_gpt_oss(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The same of gpt-oss, whose experts have biases, and each gate's column before its up's."""
    where, _, kind = name.rpartition(".")
    ending = "bias" if kind.endswith("_bias") else "weight"
    rows = tensor.transpose(-1, -2) if tensor.ndim == 3 else tensor
    if kind.startswith("gate_up_proj"):
        yield f"{where}.gate_proj.{ending}", rows[:, ::2]
        yield f"{where}.up_proj.{ending}", rows[:, 1::2]
    elif kind.startswith("down_proj"):
        yield f"{where}.down_proj.{ending}", rows
    else:
        yield name + (".weight" if kind == "sinks" else ""), tensor
