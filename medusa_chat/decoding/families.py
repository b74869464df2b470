"""Model families: those whose attention cannot hold a draft tree, and how the others attend."""

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
    """The attention windows of the layers: None for full attention, else its width. What the class
    of the config does not know is a stray key of the file, which transformers ignores."""
    width = getattr(config, "sliding_window", None)
    has_windows = hasattr(type(config), "sliding_window") or hasattr(type(config), "layer_types")
    if not has_windows or getattr(config, "use_sliding_window", True) is False:
        width = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (width,)
    found = {None if kind == "full_attention" else width for kind in kinds}
    return tuple(sorted(found, key=lambda w: w is not None))
