"""Sizes: the numbers of a model that its memory and its speed depend on, from its config alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from medusa_chat.decoding.backends.native_support import FAMILIES, reaches
from medusa_chat.errors import ModelError

# families whose MLP has two matrices; the others have a gate as well
UNGATED = {"gpt2", "gpt_neox", "gptj", "falcon", "phi", "opt", "starcoder2", "nemotron"}
# families in which every attention head has keys and values of its own, whatever the config says
UNGROUPED = {"gpt2", "gpt_neox", "gptj", "opt"}
# what published configs leave out, for it is what their family has by default
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
    }
}


@dataclass(frozen=True)
class Sizes:
    """The numbers of a config that memory depends on. linears: weights of all linears of the
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
    dtype = config.get("dtype") or config.get("torch_dtype")
    is_quantised = bool(config.get("quantization_config"))
    config = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    config = DEFAULTS.get(str(config.get("model_type")), {}) | dict(config)
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    layers = _number(config, "num_hidden_layers", "n_layer", "num_layers")
    heads = _number(config, "num_attention_heads", "n_head")
    vocabulary = _number(config, "vocab_size")
    width = config.get("head_dim") or hidden // heads
    grouped = None if config.get("model_type") in UNGROUPED else config.get("num_key_value_heads")
    key_values = grouped or heads
    attention = 2 * hidden * heads * width + 2 * hidden * key_values * width
    positions = _number(config, "max_position_embeddings", "n_positions", default=2048)
    learnt = positions * hidden if config.get("model_type") == "gpt2" else 0
    embeddings = vocabulary * hidden * (1 if _is_tied(config) else 2)
    inner, mlp, experts = _mlp(config, hidden)
    copied, is_merged = [(vocabulary, hidden, 1)], config.get("model_type") in FAMILIES
    if is_merged:
        copied += [((heads + 2 * key_values) * width, hidden, layers)]
        copied += [(hidden, heads * width, layers), (2 * inner, hidden, layers)]
        copied += [(hidden, inner, layers)]
    return Sizes(
        hidden=hidden,
        layers=layers,
        key_values=layers * key_values * width,
        vocabulary=vocabulary,
        positions=positions,
        linears=layers * (attention + mlp),
        experts=layers * experts,
        rest=embeddings + learnt + (2 * layers + 1) * hidden,
        copied=tuple(copied),
        is_merged=is_merged,
        is_tied=_is_tied(config),
        is_reached=reaches(config),
        row=2 * (heads + key_values) * width + 3 * inner + 2 * hidden,
        is_bf16=str(dtype).endswith("bfloat16") and not is_quantised,
    )


def _number(config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    value = next((config[k] for k in keys if config.get(k) is not None), default)
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise ModelError(
            f"the backbone's config.json has no valid {keys[0]} ({str(value)[:40]}): fetch it again"
        )
    return value


def _is_tied(config: Mapping[str, Any]) -> bool:
    """Families that tie unless told otherwise leave the key out of their config."""
    by_family = str(config.get("model_type")).startswith(("gemma", "gpt2", "cohere"))
    return bool(config.get("tie_word_embeddings", by_family))


def _mlp(config: Mapping[str, Any], hidden: int) -> tuple[int, int, int]:
    """One layer's MLP: its width, the weights of its linears, and those of all its experts."""
    inner = _number(config, "intermediate_size", "n_inner", default=4 * hidden)
    matrices = 2 if config.get("model_type") in UNGATED else 3
    experts = next((config[k] for k in ("num_local_experts", "num_experts") if config.get(k)), 0)
    if not experts:
        return inner, matrices * hidden * inner, 0
    inner = config.get("moe_intermediate_size") or inner
    return inner, 0, int(experts * (matrices * hidden * inner + hidden))
