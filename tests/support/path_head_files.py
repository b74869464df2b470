"""Hydra's heads and MLP speculators with random weights."""

import torch

HEADS, KEYS, HEAD, INNER = 4, 2, 8, 48  # of Hydra++'s layer, as of the tiny Llama
COUNT, STATE = 3, 24  # heads; numbers of a speculator's state


def _random(seed):
    random = torch.Generator().manual_seed(seed)

    def weight(*shape):
        return torch.randn(*shape, generator=random) / shape[-1] ** 0.5

    return weight


def hydra(hidden, vocabulary, has_prefix=False, layers=2, inner=INNER, seed=0):
    """By the names of the authors' files; head i has one repeated block behind its first."""
    weight = _random(seed)
    tensors, step = {}, 2 if has_prefix else 1
    for i in range(COUNT):
        first, read = f"hydra_mlp.{i}.{step - 1}", (i + 2) * hidden
        for name in ("linear", "res_connection"):
            tensors |= {f"{first}.{name}.weight": weight(hidden, read)}
            tensors |= {f"{first}.{name}.bias": weight(hidden)}
        block, bias = weight(hidden, hidden), weight(hidden)
        for place in range(1, layers):
            name = f"hydra_mlp.{i}.{step - 1 + step * place}.linear"
            tensors |= {f"{name}.weight": block.clone(), f"{name}.bias": bias.clone()}
        head = f"hydra_lm_head.{i}.1" if has_prefix else f"hydra_lm_head.{i}"
        tensors |= {f"{head}.weight": 4 * weight(vocabulary, hidden)}
        tensors |= {f"{head}.bias": weight(vocabulary)}
    if not has_prefix:
        return tensors
    tensors["input_embed_fn.weight"] = weight(vocabulary, hidden)
    own = {
        "embed_tokens.weight": weight(vocabulary, hidden),
        "norm.weight": 1 + 0.2 * weight(hidden),
        "layers.0.input_layernorm.weight": 1 + 0.2 * weight(hidden),
        "layers.0.post_attention_layernorm.weight": 1 + 0.2 * weight(hidden),
        "layers.0.self_attn.q_proj.weight": weight(HEADS * HEAD, hidden),
        "layers.0.self_attn.k_proj.weight": weight(KEYS * HEAD, hidden),
        "layers.0.self_attn.v_proj.weight": weight(KEYS * HEAD, hidden),
        "layers.0.self_attn.o_proj.weight": weight(hidden, HEADS * HEAD),
        "layers.0.mlp.gate_proj.weight": weight(inner, hidden),
        "layers.0.mlp.up_proj.weight": weight(inner, hidden),
        "layers.0.mlp.down_proj.weight": weight(hidden, inner),
    }
    return tensors | {f"prefix_embeding_layer.{name}": t for name, t in own.items()}


def hydra_config(**changes):
    return {
        "hydra_num_heads": COUNT,
        "hydra_num_layers": 2,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 0,
        **changes,
    }


def mlp(hidden, vocabulary, count=COUNT, seed=0):
    """By IBM's names."""
    weight, tensors = _random(seed), {}
    for i in range(count):
        tensors |= {
            f"speculator.emb.{i}.weight": weight(vocabulary, STATE),
            f"speculator.proj.{i}.weight": weight(STATE, STATE if i else hidden),
            f"speculator.ln.{i}.weight": 1 + 0.2 * weight(STATE),
            f"speculator.ln.{i}.bias": weight(STATE),
            f"speculator.head.{i}.weight": 4 * weight(vocabulary, STATE),
        }
    return tensors


def mlp_config(hidden, vocabulary, **changes):
    return {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "emb_dim": hidden,
        "inner_dim": STATE,
        "n_predict": COUNT,
        "vocab_size": vocabulary,
        "tie_weights": False,
        "scale_input": False,
        **changes,
    }
