"""Layer sizes: weights of attention, MLPs and mixtures of experts, from a config alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from medusa_chat.errors import ModelError

LARGEST = 10_000_000
MOST_LAYERS = 10_000  # each is looked at
# families whose MLP has two matrices; the others have a gate as well
UNGATED = set(
    "gpt2 gpt_neox gptj gpt_bigcode codegen falcon phi opt xglm biogpt starcoder2 nemotron arcee "
    "apertus nanochat persimmon jais2".split()
)
# families in which every attention head has keys and values of its own, whatever the config says
UNGROUPED = {"gpt2", "gpt_neox", "gptj", "opt", "biogpt", "persimmon"}
GATED_ATTENTION = {"afmoe"}
ROUTED_QUERIES = {"jetmoe"}  # an expert has queries, and what they become, as well as an MLP
TWICE = {"longcat_flash"}  # a layer has two attentions, two MLPs, and experts beside one of them
# an MLP of the dense width stands beside the experts
SHARED_WHOLE = {"hunyuan_v1_moe", "gemma4_text"} | TWICE
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
NARROW = ("moe_intermediate_size", "expert_ffn_hidden_size")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def number(
    config: Mapping[str, Any],
    *keys: str,
    default: int | None = None,
    least: int = 1,
    most: int = LARGEST,
) -> int:
    """The first of these keys that has a value. Raises ModelError for none, and for a value that is
    no number in its range."""
    value = next((config[k] for k in keys if config.get(k) is not None), default)
    if isinstance(value, list) and value == value[:1] * len(value):  # Gemma 3n: one for each layer
        value = value[0] if value else None
    if type(value) is not int or not least <= value <= most:
        raise ModelError(
            f"the backbone's config.json has no valid {keys[0]} ({str(value)[:40]}): fetch it again"
        )
    return value


def key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    """How many heads of keys and values a layer has."""
    if config.get("model_type") in UNGROUPED:
        return heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return number(config, "num_key_value_heads", "num_kv_heads", default=heads)


def attention_weights(
    config: Mapping[str, Any], hidden: int, layers: int, heads: int, key_values: int, width: int
) -> tuple[int, int]:
    """Weights of all layers' attention, and numbers of their keys and values for each token."""
    if config.get("kv_lora_rank"):
        weights, kept = _latent_attention(config, hidden, heads)
        return layers * weights, layers * kept
    heads = 0 if config.get("model_type") in ROUTED_QUERIES else heads
    gates = int(config.get("model_type") in GATED_ATTENTION)
    weights = kept = 0
    for few, wide, made in _layers(config, layers, key_values, width):
        weights += hidden * wide * ((2 + gates) * heads + made * few)
        kept += 2 * few * wide if made else 0
    return weights, kept


def _layers(
    config: Mapping[str, Any], layers: int, key_values: int, width: int
) -> Iterator[tuple[int, int, int]]:
    """Of each layer its heads of keys, their width, and how many matrices make keys and values: one
    where values are made of the keys (Gemma 4), none where a layer reads those of one before."""
    kinds, told = config.get("layer_types"), config.get("per_layer_config")
    kinds, told = kinds if isinstance(kinds, list) else [], told if isinstance(told, dict) else {}
    first = layers - number(config, "num_kv_shared_layers", default=0, least=0)
    is_one = bool(config.get("attention_k_eq_v"))
    whole = {"head_dim": config.get("global_head_dim")}
    if is_one:
        whole["num_key_value_heads"] = config.get("num_global_key_value_heads")
    for layer in range(layers):
        is_whole = kinds[layer : layer + 1] == ["full_attention"]
        own = told.get(str(layer), told.get(layer, whole if is_whole else {}))
        own = own if isinstance(own, dict) else {}
        few = number(own, "num_key_value_heads", default=key_values)
        made = 0 if layer >= first else 1 if is_whole and is_one else 2
        yield few, number(own, "head_dim", default=width), made


def layer_inputs(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int]:
    """Weights of the linears and of the embeddings that Gemma 3n and 4 have beside the rest: a
    vector of its own for each token and layer, and Gemma 3n's several streams."""
    narrow = number(config, "hidden_size_per_layer_input", default=0, least=0)
    rows = number(config, "vocab_size_per_layer_input", default=0, least=0)
    rank = number(config, "laurel_rank", default=0, least=0)
    streams = number(config, "altup_num_inputs", default=1) - 1
    linears = layers * (3 * narrow + 2 * rank) + 2 * streams * hidden
    return hidden * linears, rows * layers * narrow


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """The same where keys and values are made of one short vector (DeepSeek's MLA)."""
    rank, turned = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    key, value = number(config, "qk_nope_head_dim"), number(config, "v_head_dim")
    short = number(config, "q_lora_rank", default=0, least=0)
    query = heads * (key + turned)
    weights = short * (hidden + query) if short else hidden * query
    weights += hidden * (rank + turned) + rank * heads * (key + value) + heads * value * hidden
    return weights, rank + turned  # the cache holds the short vector


def mlp_weights(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int]:
    """The width of a layer's MLP, the weights of the linears of all, and those of all experts."""
    inner = number(config, *INNER, default=4 * hidden)
    family = config.get("model_type")
    matrices = 2 if family in UNGATED else 3
    experts = number(config, *EXPERTS, default=0, least=0)
    if not experts or config.get("is_moe") is False:
        wide = number(config, "num_kv_shared_layers", default=0, least=0)
        wide = wide if config.get("use_double_wide_mlp") else 0
        return inner, (layers + wide) * matrices * hidden * inner, 0
    narrow = number(config, *NARROW, default=inner, least=0) or inner
    count = number(config, *SHARED, default=0, least=0)
    shared = number(config, *SHARED_WIDTH, default=count * narrow, least=0)
    shared = inner if family in SHARED_WHOLE else shared
    mixed = _mixed_layers(config, layers)
    linears = (layers - mixed) * inner + mixed * shared
    each = matrices * hidden * narrow + hidden  # with its row of the router
    if family in ROUTED_QUERIES:
        width = number(config, "num_key_value_heads") * number(config, "kv_channels")
        each += 2 * hidden * width + hidden
    return narrow, matrices * hidden * linears, mixed * experts * each


def _mixed_layers(config: Mapping[str, Any], layers: int) -> int:
    """How many layers have experts."""
    kinds = config.get("mlp_layer_types")
    if isinstance(kinds, list):
        return min(layers, kinds.count("sparse"))
    usual = 2 if config.get("model_type") in TWICE else 1
    every = number(config, "decoder_sparse_step", default=usual)
    listed = config.get("mlp_only_layers")
    plain = listed if isinstance(listed, list) else ()
    first = number(config, *DENSE, default=0, least=0)
    return sum(i >= first and i not in plain and (i + 1) % every == 0 for i in range(layers))
