"""Tiny random models of every family that the engine is proven on."""

import torch
import transformers

VOCABULARY = 48
CONTEXT = 96
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.4,  # wide enough that the next token is rarely a near tie
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
BY_LENGTH = {  # rope whose frequencies depend on the length of a pass; it changes amid an answer
    "longrope": {"original_max_position_embeddings": 16, "factor": 6.0} | FACTORS,
    "dynamic": {"factor": 4.0},
}
PART = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75}  # Phi-4-mini
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "beta_fast": 16.0,
    "beta_slow": 2.0,
}
BY_POSITION = {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
GROWING = YARN | BY_POSITION  # queries grow from position 16 on
SHARED = {  # as Gemma 3n's and Gemma 4's small models: the last layers read the first ones' keys
    "head_dim": 8,
    "sliding_window": 8,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCABULARY,
}
FAMILIES = {
    "llama": ("Llama", {}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 8}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": ("Qwen2", {}),
    "qwen2-mixed": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_hidden_layers": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma": ("Gemma", {"head_dim": 8}),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
        },
    ),
    "gemma4": ("Gemma4Text", SHARED | {"global_head_dim": 16, "use_double_wide_mlp": True}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 8,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "phi3": ("Phi3", {}),
    "phi3-part": ("Phi3", {"rope_parameters": PART}),
    "gpt-neox": ("GPTNeoX", {}),
    "gpt2": ("GPT2", {}),
    "olmo2": ("Olmo2", {}),
    "granite": (
        "Granite",
        {
            "logits_scaling": 0.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 2.0,
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "smollm3-window": (
        "SmolLM3",
        {"no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 8},
    ),
    "ministral3": ("Ministral3", {"head_dim": 8, "rope_parameters": GROWING}),
    "cohere": ("Cohere", {"logit_scale": 3.0}),
    "afmoe": (
        "Afmoe",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "num_dense_layers": 1,
        },
    ),
}
MIXTURES = {  # beside those that are tested everywhere
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 8,
            "sliding_window": 8,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.5,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "residual_multiplier": 0.6,
            "embedding_multiplier": 2.0,
        },
    ),
}
GEMMA4 = {  # with norms and factors of layers that are not all 1
    "gemma4-small": FAMILIES["gemma4"],
    # as the 31B: values are made of keys, fewer of them where there is no window
    "gemma4-large": (
        "Gemma4Text",
        {
            "head_dim": 8,
            "global_head_dim": 16,
            "sliding_window": 8,
            "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 10.0,
        },
    ),
}
SLOW = {"gemma3n": ("Gemma3nText", SHARED | {"laurel_rank": 4, "intermediate_size": [48] * 4})}
RENAMED = {
    "gpt2": {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "intermediate_size": "n_inner",
    }
}


def tiny(family: str, seed: int = 0, **changes: object):
    """A random model of `family` in fp32, ready to decode."""
    name, extra = (FAMILIES | MIXTURES | GEMMA4 | SLOW)[family]
    values = COMMON | extra | changes
    values = {RENAMED.get(family, {}).get(key, key): value for key, value in values.items()}
    if family == "gpt2":
        del values["num_key_value_heads"]
    config = getattr(transformers, f"{name}Config")(**values)
    torch.manual_seed(seed)
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name.removesuffix('Text')}ForCausalLM"
    model = getattr(transformers, kind)(config)
    for name, parameter in model.named_parameters():
        if name.endswith("proj_bias"):  # of experts, which transformers begins with zeros
            torch.nn.init.normal_(parameter, std=0.4)
    for name, number in (*model.named_parameters(), *model.named_buffers()):
        if family in GEMMA4 and name.endswith(("norm.weight", "layer_scalar")):
            torch.nn.init.uniform_(number, 0.5, 1.5)
    return model.eval().requires_grad_(False)
