"""DFlash drafters with random weights."""

import torch

HEADS, KEYS, HEAD, INNER, BLOCK, MASK, LAYERS = 4, 2, 8, 48, 6, 47, 2


def config(hidden: int, taps=(1, 2), **changes) -> dict:
    """Of z-lab's files: the layers of `taps` are named by their outputs."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEYS,
        "head_dim": HEAD,
        "num_hidden_layers": LAYERS,
        "num_target_layers": 6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 256,
        "vocab_size": 48,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in taps]},
        **changes,
    }


def tensors(hidden: int, taps: int = 2, layers: int = LAYERS, seed: int = 0) -> dict:
    """By z-lab's names."""
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    def near_one(size):
        return 1 + 0.2 * torch.randn(size, generator=random)

    found = {
        "fc.weight": weight(hidden, taps * hidden),
        "hidden_norm.weight": near_one(hidden),
        "norm.weight": near_one(hidden),
    }
    for i in range(layers):
        found |= {
            f"layers.{i}.input_layernorm.weight": near_one(hidden),
            f"layers.{i}.post_attention_layernorm.weight": near_one(hidden),
            f"layers.{i}.self_attn.q_proj.weight": 2 * weight(HEADS * HEAD, hidden),
            f"layers.{i}.self_attn.k_proj.weight": weight(KEYS * HEAD, hidden),
            f"layers.{i}.self_attn.v_proj.weight": 2 * weight(KEYS * HEAD, hidden),
            f"layers.{i}.self_attn.o_proj.weight": 2 * weight(hidden, HEADS * HEAD),
            f"layers.{i}.self_attn.q_norm.weight": near_one(HEAD),
            f"layers.{i}.self_attn.k_norm.weight": near_one(HEAD),
            f"layers.{i}.mlp.gate_proj.weight": weight(INNER, hidden),
            f"layers.{i}.mlp.up_proj.weight": weight(INNER, hidden),
            f"layers.{i}.mlp.down_proj.weight": weight(hidden, INNER),
        }
    return found


def markov(vocabulary: int, rank: int = 4, seed: int = 3) -> dict:
    """DSpark's term for neighbours."""
    random = torch.Generator().manual_seed(seed)
    return {
        f"markov_head.markov_w{place}.weight": torch.randn(vocabulary, rank, generator=random)
        for place in (1, 2)
    }
