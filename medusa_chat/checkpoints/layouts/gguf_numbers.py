"""Numbers of the metadata of a GGUF file, checked."""

import math
from collections.abc import Mapping
from typing import Any

from medusa_chat.errors import ModelError

MAX_COUNT = 2**31


def count(metadata: Mapping[str, Any], key: str, where: str, default: int | None = None) -> int:
    """A count from 1, for all layers where there is one for each. Raises ModelError for what is
    none, and where layers differ."""
    value = metadata.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, list):
        raise ModelError(
            f"{where} has a different {key} in each layer, which is not supported: take the "
            "model's safetensors"
        )
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    return value


def positive(metadata: Mapping[str, Any], key: str, default: float | None, where: str) -> float:
    """A positive number. Raises ModelError for what is none, as where it and a default lack."""
    value = metadata.get(key, default)
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ModelError(f"{where} has no valid {key} ({str(value)[:40]}): fetch it again")
    return float(value)


def layers_of(metadata: Mapping[str, Any], family: str, where: str) -> int:
    """Layers of the model itself: those behind them draft tokens (multi-token prediction), and are
    left out. Raises ModelError."""
    key = f"{family}.nextn_predict_layers"
    layers, drafts = count(metadata, f"{family}.block_count", where), metadata.get(key, 0)
    if type(drafts) is not int or not 0 <= drafts < layers:
        raise ModelError(f"{where} has no valid {key} ({str(drafts)[:40]}): fetch it again")
    return layers - drafts
