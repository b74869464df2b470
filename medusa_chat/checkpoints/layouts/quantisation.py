"""Quantised sources: what cannot be read of them here, told from the config alone."""

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from medusa_chat.errors import ModelError

# methods of quantization_config that transformers reads by another package -> its module
PACKAGES = {
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "auto-round": "auto_round",
    "compressed-tensors": "compressed_tensors",
    "torchao": "torchao",
    "aqlm": "aqlm",
    "hqq": "hqq",
    "quanto": "optimum.quanto",
    "eetq": "kernels",
    "higgs": "flute",
    "spqr": "spqr_quant",
    "vptq": "vptq",
    "quark": "quark",
}


def refuse_unread(config: Mapping[str, Any], where: str) -> None:
    """Raises ModelError for weights in a method that cannot be read here."""
    found = config.get("quantization_config") or {}
    method = found.get("quant_method")
    if isinstance(config.get("quantization"), dict) and method is None:
        method = "MLX"
    elif not isinstance(method, str) or _is_there(PACKAGES.get(method)):
        return
    raise ModelError(
        f"{where}: the weights are quantised by {method}, which is not read here: take the model "
        "unquantised, or as a GGUF file"
    )


def _is_there(package: str | None) -> bool:
    if package is None:
        return True
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # of what is before the dot
        return False
