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
# what the C library's decoder takes
NATIVE_FAMILIES = ("llama", "mistral", "qwen2", "phi3")  # whose layers are merged (fused_layers.py)
LANES = 8  # numbers of a vector, which a hidden size is a multiple of
LARGEST_HEAD, LARGEST_HIDDEN = 512, 16384


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


def windows(config: Any) -> tuple[int | None, ...]:
    """The attention windows of the layers: None for full attention, else its width. A key that the
    config's class does not know is ignored, as by transformers."""
    width = getattr(config, "sliding_window", None)
    has_windows = hasattr(type(config), "sliding_window") or hasattr(type(config), "layer_types")
    if not has_windows or getattr(config, "use_sliding_window", True) is False:
        width = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (width,)
    widths = {None if kind == "full_attention" else width for kind in kinds}
    return tuple(sorted(widths, key=lambda w: w is not None))


def native_supports(config: Mapping[str, Any]) -> bool:
    """Whether the C library supports a text model of this config: a known family with gated SiLU,
    one kind of attention layer, and a hidden size of whole vectors."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if config.get("model_type") not in NATIVE_FAMILIES or not hidden or not heads:
        return False
    width = config.get("head_dim") or hidden // heads
    return (
        config.get("hidden_act", "silu") == "silu"
        and not _is_mixed(config)
        and hidden % LANES == 0
        and hidden <= LARGEST_HIDDEN
        and width % 2 == 0
        and width <= LARGEST_HEAD
    )


def _is_mixed(config: Mapping[str, Any]) -> bool:
    """Whether some layers have an attention window and some have none."""
    kinds = config.get("layer_types")
    if kinds:
        return len(set(kinds)) > 1
    windowed = config.get("use_sliding_window") and config.get("sliding_window")
    whole = config.get("max_window_layers", 28)  # so many first layers of Qwen2 have none
    layers = config.get("num_hidden_layers") or 0
    return bool(config.get("model_type") == "qwen2" and windowed and 0 < whole < layers)
