"""EAGLE drafters with random weights, written in every layout."""

import torch

WIDTH, HEADS, KEYS, INNER, DRAFTED = 48, 4, 2, 64, 40


def config(hidden: int = WIDTH, **changes) -> dict:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "draft_vocab_size": DRAFTED,
        **changes,
    }


def eagle_3(hidden: int, vocabulary: int, taps: int = 3, layers: int = 1, seed: int = 0) -> dict:
    """Tensors by the names of speculators, d2t as a difference."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    def near_one(size):
        return 1 + 0.2 * torch.randn(size, generator=random)

    head = WIDTH // HEADS
    tensors = {
        "fc.weight": weight(WIDTH, taps * hidden),
        "norm.weight": near_one(WIDTH),
        "lm_head.weight": 8 * weight(DRAFTED, WIDTH),
        "embed_tokens.weight": weight(vocabulary, WIDTH),
        "layers.0.hidden_norm.weight": near_one(WIDTH),
    }
    for i in range(layers):
        read = WIDTH if i else 2 * WIDTH
        tensors |= {
            f"layers.{i}.input_layernorm.weight": near_one(WIDTH),
            f"layers.{i}.post_attention_layernorm.weight": near_one(WIDTH),
            f"layers.{i}.self_attn.q_proj.weight": weight(WIDTH, read),
            f"layers.{i}.self_attn.k_proj.weight": weight(KEYS * head, read),
            f"layers.{i}.self_attn.v_proj.weight": weight(KEYS * head, read),
            f"layers.{i}.self_attn.o_proj.weight": weight(WIDTH, WIDTH),
            f"layers.{i}.mlp.gate_proj.weight": weight(INNER, WIDTH),
            f"layers.{i}.mlp.up_proj.weight": weight(INNER, WIDTH),
            f"layers.{i}.mlp.down_proj.weight": weight(WIDTH, INNER),
        }
    ids = torch.randperm(vocabulary, generator=random)[:DRAFTED].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFTED)
    return tensors


def eagle_1(hidden: int, has_bias: bool = True, seed: int = 0) -> dict:
    """Tensors of EAGLE-1, as wide as the backbone, without embeddings."""
    assert hidden % HEADS == 0
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    head = hidden // HEADS
    tensors = {
        "fc.weight": weight(hidden, 2 * hidden),
        "layers.0.self_attn.q_proj.weight": weight(hidden, hidden),
        "layers.0.self_attn.k_proj.weight": weight(KEYS * head, hidden),
        "layers.0.self_attn.v_proj.weight": weight(KEYS * head, hidden),
        "layers.0.self_attn.o_proj.weight": weight(hidden, hidden),
        "layers.0.mlp.gate_proj.weight": weight(INNER, hidden),
        "layers.0.mlp.up_proj.weight": weight(INNER, hidden),
        "layers.0.mlp.down_proj.weight": weight(hidden, INNER),
        "layers.0.post_attention_layernorm.weight": 1 + 0.2 * weight(hidden),
    }
    return tensors | ({"fc.bias": weight(hidden)} if has_bias else {})
