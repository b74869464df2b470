"""Sizes: the numbers that a model's memory and speed depend on, from its config alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.checkpoints.layouts.text_part import text_part
from medusa_chat.decoding.families import NATIVE_FAMILIES, native_supports
from medusa_chat.errors import ModelError

LEARNT = {"gpt2", "gpt_bigcode", "opt", "biogpt"}  # families with a vector for each position
TIED = (  # prefixes of families that tie the LM head by default
    *("gemma", "gpt2", "gpt_bigcode", "cohere", "opt", "xglm", "biogpt", "falcon", "starcoder2"),
    *("smollm3", "ernie4_5_moe", "granite_swa", "jetmoe", "minicpm3", "vaultgemma", "youtu"),
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a config that memory depends on. positions: the most tokens that the model can
    read; context: the default of a load. linears: weights of all linears in the layers; experts:
    those of a mixture's experts, which bitsandbytes does not quantise, and of which a token passes
    through the part `chosen`; rest: embeddings, LM head and norms. copied: (outputs, inputs, count)
    of the linears that a CPU may lay out a second time; is_merged: whether several linears of a
    layer are merged. is_reached: whether the C pass runs the model; row: numbers in its workspace
    for a row of a pass. is_bf16: whether files are in bf16."""

    hidden: int
    layers: int
    key_values: int
    vocabulary: int
    positions: int
    context: int
    linears: int
    experts: int
    rest: int
    copied: tuple[tuple[int, int, int], ...]
    is_merged: bool = False
    is_tied: bool = False
    is_reached: bool = False
    row: int = 0
    is_bf16: bool = False
    chosen: float = 1.0

    @property
    def parameters(self) -> int:
        return self.linears + self.experts + self.rest


def sizes(config: Mapping[str, Any]) -> Sizes:
    """The sizes in a transformers config, whatever keys its family uses. Raises ModelError if one
    is missing."""
    config = text_part(config)
    dtype = config.get("dtype") or config.get("torch_dtype")
    is_quantised = bool(config.get("quantization_config"))
    hidden = number(config, "hidden_size", "n_embd", "d_model")
    layers = number(config, "num_hidden_layers", "n_layer", "num_layers", most=MOST_LAYERS)
    layers *= 2 if config.get("model_type") in TWICE else 1
    heads = number(config, "num_attention_heads", "n_head", "attention_heads")
    vocabulary = number(config, "vocab_size")
    width = config.get("head_dim") or config.get("kv_channels") or hidden // heads
    key_values = key_value_heads(config, heads)
    attention, kept = attention_weights(config, hidden, layers, heads, key_values, width)
    positions = number(config, "max_position_embeddings", "n_positions", default=2048)
    learnt = positions * hidden if config.get("model_type") in LEARNT else 0
    embeddings = vocabulary * hidden * (1 if _is_tied(config) else 2)
    inner, mlps, experts = mlp_weights(config, hidden, layers)
    inputs, more = layer_inputs(config, hidden, layers)
    count, each = experts_of(config)
    copied = [(vocabulary, hidden, 1)]
    is_alone = bool(experts) or config.get("model_type") == "gemma4_text"  # merged for C alone
    is_merged = config.get("model_type") in NATIVE_FAMILIES and not is_alone
    own = 2 * layers * number(config, "hidden_size_per_layer_input", default=0, least=0)
    fed = (
        3 * inner + 2 * hidden if not experts else each * (2 * inner + hidden) + count + 3 * hidden
    )
    if is_merged:
        copied += [((heads + 2 * key_values) * width, hidden, layers)]
        copied += [(hidden, heads * width, layers), (2 * inner, hidden, layers)]
        copied += [(hidden, inner, layers)]
    return Sizes(
        hidden=hidden,
        layers=layers,
        key_values=kept // 2,
        vocabulary=vocabulary,
        positions=positions,
        context=usual_context(positions, config),
        linears=attention + mlps + inputs,
        experts=experts,
        rest=embeddings + more + learnt + (2 * layers + 1) * hidden,
        copied=tuple(copied),
        is_merged=is_merged,
        is_tied=_is_tied(config),
        is_reached=native_supports(config),
        row=2 * (heads + key_values) * width + fed + own,
        is_bf16=str(dtype).endswith("bfloat16") and not is_quantised,
        chosen=each / count if experts else 1.0,
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Whether the LM head is tied; families that tie by default may leave out the key."""
    by_family = str(config.get("model_type")).startswith(TIED)
    return bool(config.get("tie_word_embeddings", by_family))


LARGEST = 10_000_000
MOST_LAYERS = 10_000  # there is a loop over them
# families whose MLP has two matrices; the others have a gate as well
UNGATED = set(
    "gpt2 gpt_neox gptj gpt_bigcode codegen falcon phi opt xglm biogpt starcoder2 nemotron arcee "
    "apertus nanochat persimmon jais2".split()
)
# families in which every attention head has its own keys and values, whatever the config says
UNGROUPED = {"gpt2", "gpt_neox", "gptj", "opt", "biogpt", "persimmon"}
GATED_ATTENTION = {"afmoe"}
ROUTED_QUERIES = {"jetmoe"}  # an expert has query and output projections as well as an MLP
TWICE = {"longcat_flash"}  # a layer has two attentions, two MLPs, and experts beside one of them
# families with an MLP of the dense width beside the experts
SHARED_WHOLE = {"hunyuan_v1_moe", "gemma4_text"} | TWICE
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_k")
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
    """The value of the first of these keys that has one. Raises ModelError if there is none, and
    for a value that is not a number in the range."""
    value = next((config[k] for k in keys if config.get(k) is not None), default)
    if isinstance(value, list) and value == value[:1] * len(value):  # Gemma 3n: one for each layer
        value = value[0] if value else None
    if type(value) is not int or not least <= value <= most:
        raise ModelError(
            f"the backbone's config.json has no valid {keys[0]} ({str(value)[:40]}): "
            "download it again"
        )
    return value


def key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    """The number of key-value heads in a layer."""
    if config.get("model_type") in UNGROUPED:
        return heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    return number(config, "num_key_value_heads", "num_kv_heads", default=heads)


def attention_weights(
    config: Mapping[str, Any], hidden: int, layers: int, heads: int, key_values: int, width: int
) -> tuple[int, int]:
    """(weights of all layers' attention, numbers in their keys and values for each token)."""
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
    """(key-value heads, their width, number of key and value matrices) of each layer: one matrix if
    values are computed from the keys (Gemma 4), none if a layer reads an earlier layer's cache."""
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
    """(weights of the linears, weights of the embeddings) that Gemma 3n and 4 have in addition: a
    vector for each token and layer, and Gemma 3n's several streams."""
    narrow = number(config, "hidden_size_per_layer_input", default=0, least=0)
    rows = number(config, "vocab_size_per_layer_input", default=0, least=0)
    rank = number(config, "laurel_rank", default=0, least=0)
    streams = number(config, "altup_num_inputs", default=1) - 1
    linears = layers * (3 * narrow + 2 * rank) + 2 * streams * hidden
    return hidden * linears, rows * layers * narrow


def _latent_attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[int, int]:
    """The same for one layer whose keys and values share a latent vector (DeepSeek's MLA)."""
    rank, turned = number(config, "kv_lora_rank"), number(config, "qk_rope_head_dim")
    key, value = number(config, "qk_nope_head_dim"), number(config, "v_head_dim")
    short = number(config, "q_lora_rank", default=0, least=0)
    query = heads * (key + turned)
    weights = short * (hidden + query) if short else hidden * query
    weights += hidden * (rank + turned) + rank * heads * (key + value) + heads * value * hidden
    return weights, rank + turned  # the cache holds the short vector


def mlp_weights(config: Mapping[str, Any], hidden: int, layers: int) -> tuple[int, int, int]:
    """(width of a layer's MLP, weights of all MLPs' linears, weights of all experts)."""
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


def experts_of(config: Mapping[str, Any]) -> tuple[int, int]:
    """(experts of a layer, of which a token passes through so many); 1 and 1 of one without."""
    count = number(config, *EXPERTS, default=0, least=0) or 1
    chosen = next((config[key] for key in CHOSEN if config.get(key)), count)
    return count, min(chosen, count) if type(chosen) is int else count


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


LONGEST = 8192
LONGROPE = ("longrope", "su")  # the second in old files


def usual_context(limit: int, config: Mapping[str, Any]) -> int:
    """The default context of a text model that can read `limit` tokens: at most LONGEST, and with
    longrope at most what its short factors cover. config: a file's, or transformers'."""
    return min(limit, LONGEST, short_length(config) or limit)


def short_length(config: Mapping[str, Any]) -> int | None:
    """The longest context that the short factors of a model's longrope cover; None for a model
    without longrope."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, Mapping))]
    own = config.get("original_max_position_embeddings")  # which transformers reads first
    lengths = [
        own or part.get("original_max_position_embeddings")
        for part in kinds
        if (part.get("rope_type") or part.get("type")) in LONGROPE
    ]
    return min((one for one in lengths if type(one) is int and one > 0), default=None)
