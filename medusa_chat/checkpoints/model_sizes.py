"""Sizes: the numbers of a model that its memory and its speed depend on, from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.checkpoints.layer_sizes import (
    MOST_LAYERS,
    TWICE,
    attention_weights,
    key_value_heads,
    layer_inputs,
    mlp_weights,
    number,
)
from medusa_chat.checkpoints.layouts.text_part import text_part
from medusa_chat.checkpoints.usual_context import usual_context
from medusa_chat.decoding.families import NATIVE_FAMILIES, native_supports

LEARNT = {"gpt2", "gpt_bigcode", "opt", "biogpt"}  # families with a vector for each position
TIED = (  # beginnings of families that tie the LM head unless told otherwise
    *("gemma", "gpt2", "gpt_bigcode", "cohere", "opt", "xglm", "biogpt", "falcon", "starcoder2"),
    *("smollm3", "ernie4_5_moe", "granite_swa", "jetmoe", "minicpm3", "vaultgemma", "youtu"),
)


@dataclass(frozen=True)
class Sizes:
    """The numbers of a config that memory depends on. positions: tokens that it can read;
    context: those of a load where nobody says. linears: weights of all linears of the
    layers; experts: those of a mixture, which bitsandbytes leaves as they are; rest: embeddings,
    LM head and norms. copied: (outputs, inputs, how many) of the linears that a CPU may lay out
    a second time; is_merged: whether several of a layer become one. is_reached: whether our C code
    knows such a model; row: numbers that it works in for a row of a pass. is_bf16: whether files
    are in bf16."""

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

    @property
    def parameters(self) -> int:
        return self.linears + self.experts + self.rest


def sizes(config: Mapping[str, Any]) -> Sizes:
    """Read a transformers config, whatever its family calls things. Raises ModelError for one
    that lacks a number."""
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
    copied, is_merged = [(vocabulary, hidden, 1)], config.get("model_type") in NATIVE_FAMILIES
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
        row=2 * (heads + key_values) * width + 3 * inner + 2 * hidden,
        is_bf16=str(dtype).endswith("bfloat16") and not is_quantised,
    )


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Families that tie unless told otherwise leave the key out of their config."""
    by_family = str(config.get("model_type")).startswith(TIED)
    return bool(config.get("tie_word_embeddings", by_family))
