"""Rope: rotary frequencies that transformers chooses by the length of a pass, chosen once."""

from collections.abc import Mapping
from typing import Any

from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

BY_LENGTH = ("longrope", "dynamic")


def fix_frequencies(model: Any, context: int) -> None:
    """Give the model's rotary embeddings the frequencies of a text of `context` tokens for every
    text. Those of longrope and dynamic scaling depend on the last position of a pass: a tree
    reaches further than a row, and the cache keeps keys that were turned by others."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            module.rope_type = _fixed(module, kinds, context)
        elif isinstance(kinds, Mapping):  # by the kind of a layer
            module.rope_type = {k: _fixed(module, kinds[k], context, k) for k in kinds}


def _fixed(module: Any, kind: str, context: int, layer: str | None = None) -> str:
    """The kind of rope that the module has afterwards."""
    if kind not in BY_LENGTH:
        return kind
    frequencies = getattr(module, f"{layer}_inv_freq" if layer else "inv_freq")
    device, by_layer = frequencies.device, {"layer_type": layer} if layer else {}
    chosen, _ = ROPE_INIT_FUNCTIONS[kind](module.config, device, seq_len=context, **by_layer)
    frequencies.copy_(chosen)
    return "default"
