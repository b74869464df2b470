"""Model families: which attention can hold a draft tree, and which decoders C has. No torch."""

from collections.abc import Mapping
from typing import Any

from medusa_chat.errors import ModelError

LAYER_KINDS = {"full_attention", "sliding_attention", "attention"}
# families with a recurrent state, which cannot branch, and with ALiBi, a bias by distance
RECURRENT = (
    "mamba mamba2 falcon_mamba rwkv jamba bamba zamba zamba2 recurrent_gemma "
    "lfm2 lfm2_moe qwen3_next qwen3_5 qwen3_5_moe nemotron_h xlstm minimax falcon_h1 kimi_linear"
).split()
ALIBI = ("bloom", "mpt")
TEXTLESS = ("mistral4", "step3p5")  # text parts without a class in transformers 5.23
UNPROVEN = ("llama4", "llama4_text", "gpt_neo")  # their attention windows do not follow the mask
# whose layers are described as data (layer_forms.py): merged for torch, and passed through by C
NATIVE_FAMILIES = (
    "llama mistral qwen2 phi3 qwen3 gemma gemma2 gemma3_text ministral3 smollm3 granite "
    "qwen3_moe mixtral granitemoe gpt_oss gemma4_text"
).split()
HEAD_NORMED = (
    "qwen3",
    "qwen3_moe",
    "gemma3_text",
    "gemma4_text",
)  # queries and keys of a head are normed
GATES = {"silu": "silu", "gelu_pytorch_tanh": "gelu"}  # what multiplies the up product
ACTIVATION = dict.fromkeys(
    ("gemma2", "gemma3_text", "gemma4_text"), "hidden_activation"
)  # key of a config
# what the C library's decoder takes
LANES = 8  # numbers of a vector, which a hidden size is a multiple of
LARGEST_HEAD, LARGEST_HIDDEN, MOST_EXPERTS = 512, 16384, 512
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # a config's count of them


def refuse_unfit(config: Any) -> None:
    """Raise ModelError for a model family that tree attention does not support."""
    family = config.model_type
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if family in UNPROVEN:
        why = "its local attention is not tested with tree attention"
    elif family == "mllama":
        why = "its layers that attend to pictures (cross attention) do not work with our cache"
    elif family == "paligemma":
        why = "it attends a prompt both ways, which our cache cannot hold"
    elif getattr(config, "is_encoder_decoder", False):
        why = "it has an encoder, and only decoders are"
    elif family in RECURRENT or not kinds <= LAYER_KINDS:
        why = "a recurrent state or sparse attention does not work with tree attention"
    elif getattr(config, "vision_config", None) and family != "phi4_multimodal":
        why = "a vision-language model whose text part is not a model of its own"
    elif family in ALIBI or getattr(config, "alibi", False):
        why = "ALiBi position encodings do not work with tree attention"
    elif family in TEXTLESS:
        why = "transformers has no language model of it that could be read alone"
    else:
        return
    raise ModelError(f"model family {family} is not supported: {why}")


def needs_eager(model: Any) -> bool:
    """Whether a model changes attention scores in a way that only its own eager attention applies:
    a cap, sinks (gpt-oss, Granite SWA), or what its family has."""
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    has_sinks = any(name.endswith(".sinks") for name, _ in model.named_parameters())
    return capped or has_sinks or config.model_type in ("gptj", "falcon")


def window_of(config: Any, kind: str | None) -> int | None:
    """The attention window of the layers of a kind (None: the model has one kind): None for full
    attention, else its width. A key that the config's class does not know is ignored, as by
    transformers."""
    width: int | None = getattr(config, "sliding_window", None)
    has_windows = hasattr(type(config), "sliding_window") or hasattr(type(config), "layer_types")
    is_off = not has_windows or getattr(config, "use_sliding_window", True) is False
    return None if is_off or kind == "full_attention" else width


def windows(config: Any) -> tuple[int | None, ...]:
    """The attention windows of a model's layers, each width once, None first."""
    kinds = getattr(config, "layer_types", None) or [None]
    widths = {window_of(config, kind) for kind in kinds}
    return tuple(sorted(widths, key=lambda w: w is not None))


def gate_of(config: Mapping[str, Any]) -> str | None:
    """Which gate the layers of a text model of this config have, of GATES or "clamped"
    (gpt-oss); None for another."""
    family = str(config.get("model_type"))
    if family == "gpt_oss":  # whatever its config says
        return "clamped"
    return GATES.get(config.get(ACTIVATION.get(family, "hidden_act"), "silu"))


def native_supports(config: Mapping[str, Any]) -> bool:
    """Whether the C library supports a text model of this config: a family and a gate that are
    described, and sizes of whole vectors."""
    family, hidden = config.get("model_type"), config.get("hidden_size")
    heads = config.get("num_attention_heads")
    if family not in NATIVE_FAMILIES or not hidden or not heads:
        return False
    widths = {config.get("head_dim") or hidden // heads, *_own_widths(config)}
    both_ways = (None, False, "vision")  # rows of pictures, which there are none of here
    experts = next((count for key in EXPERTS if (count := config.get(key))), 0)
    return (
        gate_of(config) is not None
        and experts <= MOST_EXPERTS
        and config.get("use_bidirectional_attention") in both_ways
        and not config.get("enable_moe_block")  # experts beside gated products
        and hidden % LANES == 0
        and (config.get("hidden_size_per_layer_input") or 0) % LANES == 0
        and hidden <= LARGEST_HIDDEN
        and all(width % (LANES if family in HEAD_NORMED else 2) == 0 for width in widths)
        and max(widths) <= LARGEST_HEAD
    )


def _own_widths(config: Mapping[str, Any]) -> set[int]:
    """The widths of heads that some layers have in place of the usual one (Gemma 4)."""
    told = config.get("per_layer_config")
    layers = told.values() if isinstance(told, Mapping) else ()
    own = [layer.get("head_dim") for layer in layers if isinstance(layer, Mapping)]
    return {width for width in (config.get("global_head_dim"), *own) if isinstance(width, int)}
