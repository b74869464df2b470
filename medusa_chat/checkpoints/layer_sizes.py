"""Layer sizes: weights of attention, MLPs and mixtures of experts, from a config alone."""

from collections.abc import Mapping
from typing import Any

from medusa_chat.errors import ModelError

LARGEST = 10_000_000
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
SHARED_WHOLE = {"hunyuan_v1_moe"} | TWICE  # an MLP of the dense width stands beside the experts
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
DENSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
NARROW = ("moe_intermediate_size", "expert_ffn_hidden_size")
INNER = ("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")


def number(
    config: Mapping[str, Any], *keys: str, default: int | None = None, least: int = 1
) -> int:
    """The first of these keys that has a value. Raises ModelError for none, and for a value that is
    no number in its range."""
    value = next((config[k] for k in keys if config.get(k) is not None), default)
    if type(value) is not int or not least <= value <= LARGEST:
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
    config: Mapping[str, Any], hidden: int, heads: int, key_values: int, width: int
) -> tuple[int, int]:
    """Weights of a layer's attention, and numbers of its keys and values for each token."""
    if config.get("kv_lora_rank"):
        return _latent_attention(config, hidden, heads)
    heads = 0 if config.get("model_type") in ROUTED_QUERIES else heads
    gates = int(config.get("model_type") in GATED_ATTENTION)
    kept = 2 * key_values * width
    return (2 + gates) * hidden * heads * width + hidden * kept, kept


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
        return inner, layers * matrices * hidden * inner, 0
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
