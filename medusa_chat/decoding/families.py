"""Model families: those whose attention cannot hold a draft tree, and how the others attend."""

from typing import Any

from medusa_chat.errors import ModelError

LAYER_KINDS = {"full_attention", "sliding_attention"}
STATE = "its recurrent state does not work with tree attention"  # it cannot branch
RECURRENT = (
    "mamba mamba2 falcon_mamba rwkv jamba bamba zamba zamba2 recurrent_gemma granitemoehybrid "
    "lfm2 lfm2_moe qwen3_next qwen3_5 nemotron_h xlstm minimax falcon_h1 kimi_linear"
).split()
BIAS = "ALiBi position encodings do not work with tree attention"  # they count places
WINDOWS = "its local attention is not tested with tree attention"  # it does not follow the mask
UNFIT = {  # why a family is refused
    **dict.fromkeys(RECURRENT, STATE),
    **dict.fromkeys(("bloom", "mpt"), BIAS),
    **dict.fromkeys(("llama4", "llama4_text", "gpt_neo"), WINDOWS),
}


def refuse_unfit(config: Any) -> None:
    """Raise ModelError for a model family that tree attention does not support."""
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    why = UNFIT.get(config.model_type)
    if not kinds <= LAYER_KINDS:
        why = STATE
    elif why is None and getattr(config, "alibi", False):
        why = BIAS
    if why is not None:
        raise ModelError(f"model family {config.model_type} is not supported: {why}")


def needs_eager(config: Any) -> bool:
    """Whether the family changes attention scores in a way that only its eager attention
    applies."""
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return capped or config.model_type in ("gpt_oss", "gptj", "falcon")


def windows(config: Any) -> tuple[int | None, ...]:
    """The attention windows of the layers: None for full attention, else its width."""
    width = getattr(config, "sliding_window", None)
    if getattr(config, "use_sliding_window", True) is False:
        width = None
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return (width,)
    found = {None if kind == "full_attention" else width for kind in kinds}
    return tuple(sorted(found, key=lambda w: w is not None))
