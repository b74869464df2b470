"""The rotary embedding of a GGUF model, as rope_parameters of a transformers config.

llama.cpp keeps the scaling of Llama 3.1 and of Phi-3's long models as tensors of frequencies, which
transformers 5.23 leaves out: the model would then read positions that it was not trained on.
"""

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

from medusa_chat.checkpoints.layouts.gguf_header import GgufHeader, positive
from medusa_chat.checkpoints.layouts.gguf_names import ROPE
from medusa_chat.checkpoints.layouts.source import Source
from medusa_chat.errors import ModelError

FREQUENCIES, LONG, SHORT = ROPE
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
NESTED = (
    "gemma3_text",
    "gemma4_text",
    "olmo3",
)  # layers with a window have an embedding of their own
PARTIAL = ("phi3", "glm4", "glm4moe", "minimax-m2")  # a part of each head is turned
YARN = {
    "attention_factor": ("yarn_attn_factor", "attn_factor"),
    "beta_fast": ("yarn_beta_fast",),
    "beta_slow": ("yarn_beta_slow",),
    "mscale": ("yarn_log_multiplier",),
    "mscale_all_dim": ("yarn_log_multiplier",),
}
MOST = 1024  # numbers of such a tensor
SAME = 1e-3
STILL = 1e20  # a factor by which no position turns


def rope_parameters(
    header: GgufHeader, family: str, kind: str, width: int, source: Source, file: str
) -> dict[str, Any]:
    """rope_parameters as a transformers config has them. kind: the model_type there; width: numbers
    of an attention head. Raises ModelError for a scaling that is not known."""
    where = f"{source.name}/{file}"
    base = positive(header.metadata, f"{family}.rope.freq_base", 10_000.0, where)
    scaling = _scaling(header.metadata, family, where)
    if LONG in header.tensors or SHORT in header.tensors:
        scaling = _long(header, family, source, file)
    if FREQUENCIES in header.tensors:
        factors = _floats(header, FREQUENCIES, source, file)
        is_part = kind == "gemma4_text"
        scaling = _part(factors, where) if is_part else _llama3(factors, base, width, where)
    turned = header.metadata.get(f"{family}.rope.dimension_count", width)
    if turned != width and family not in PARTIAL:
        raise _unknown(where, f"for a part of each head, {str(turned)[:40]} of {width} numbers")
    if family in PARTIAL and type(turned) is int and 0 < turned <= width:
        scaling |= {"partial_rotary_factor": turned / width}
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": base, **scaling}
    if family == "deepseek2":  # where it is a tenth, for older files' sake
        for name in {"mscale", "mscale_all_dim"} & parameters.keys():
            parameters[name] = round(10 * float(parameters[name]), 6)
    if kind == "gpt_oss":
        parameters["truncate"] = False
    if kind == "ministral3":
        if parameters["rope_type"] != "yarn":
            raise _unknown(where, "by position, without YaRN")
        key = f"{family}.attention.temperature_scale"
        parameters["llama_4_scaling_beta"] = positive(header.metadata, key, None, where)
    if kind not in NESTED:
        return parameters
    usual = 10_000.0 if kind.startswith("gemma") else base
    near = positive(header.metadata, f"{family}.rope.freq_base_swa", usual, where)
    windowed = {"rope_type": "default", "rope_theta": near}
    return {"full_attention": parameters, "sliding_attention": windowed}


def _scaling(metadata: Mapping[str, Any], family: str, where: str) -> dict[str, Any]:
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = positive(metadata, f"{family}.rope.scaling.factor", 1.0, where)
    if kind == "none" or factor == 1.0:
        return {}
    start = metadata.get(f"{family}.rope.scaling.original_context_length")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and type(start) is int and start > 0:
        scaled = {"factor": factor, "original_max_position_embeddings": start}
        for name, keys in YARN.items():
            if key := next((k for k in keys if f"{family}.rope.scaling.{k}" in metadata), None):
                scaled[name] = positive(metadata, f"{family}.rope.scaling.{key}", None, where)
        return {"rope_type": "yarn"} | scaled
    if kind == "longrope":
        return {}  # its factors are tensors
    raise _unknown(where, f"of the type {str(kind)[:40]!r}")


def _long(header: GgufHeader, family: str, source: Source, file: str) -> dict[str, Any]:
    start = header.metadata.get(f"{family}.rope.scaling.original_context_length")
    both = LONG in header.tensors and SHORT in header.tensors
    if family != "phi3" or not both or type(start) is not int or start < 1:
        raise _unknown(f"{source.name}/{file}", "with factors by length")
    return {
        "rope_type": "longrope",
        "long_factor": _floats(header, LONG, source, file),
        "short_factor": _floats(header, SHORT, source, file),
        "original_max_position_embeddings": start,
    }


def _llama3(factors: Sequence[float], base: float, width: int, where: str) -> dict[str, Any]:
    """The parameters that give these factors, by which the frequencies are divided."""
    factor = round(max(factors), 3)
    if all(abs(one - 1) < SAME for one in factors):
        return {}
    if factor < 1:
        raise _unknown(where, f"with factors below 1, up to {max(factors):g}")
    expected = [_llama3_factor(base ** (2 * i / width), factor) for i in range(width // 2)]
    pairs = zip(factors, expected, strict=False)
    if len(factors) != len(expected) or any(abs(a - b) > SAME * b for a, b in pairs):
        raise _unknown(where, f"with factors up to {factor:g}")
    return {"rope_type": "llama3", "factor": factor} | LLAMA3


def _part(factors: Sequence[float], where: str) -> dict[str, Any]:
    """Gemma 4's: the first pairs of a head are turned, the others' frequencies divided to nothing
    (generate_extra_tensors of Gemma4Model in llama.cpp's conversion/gemma.py)."""
    turned = sum(one == 1 for one in factors)
    if any(one != 1 for one in factors[:turned]) or any(one < STILL for one in factors[turned:]):
        raise _unknown(where, "with factors that are neither 1 nor beyond all")
    return {"rope_type": "proportional", "partial_rotary_factor": turned / len(factors)}


def _llama3_factor(period: float, factor: float) -> float:
    """By how much Llama 3.1 divides a frequency. period: tokens of a turn / 2 pi."""
    low, high, start = LLAMA3.values()
    turns = start / (2 * math.pi * period)
    if turns <= low or turns >= high:
        return factor if turns <= low else 1.0
    smooth = (turns - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


def _floats(header: GgufHeader, name: str, source: Source, file: str) -> list[float]:
    tensor = header.tensors[name]
    if tensor.type != 0 or len(tensor.shape) != 1 or tensor.shape[0] > MOST:
        raise _unknown(f"{source.name}/{file}", f"in {name}")
    data = source.read(file, tensor.start, tensor.bytes)
    values = struct.unpack(f"<{tensor.shape[0]}f", data)
    if not all(0 < value < math.inf for value in values):
        raise _unknown(f"{source.name}/{file}", f"in {name}, not positive numbers")
    return list(values)


def _unknown(where: str, what: str) -> ModelError:
    return ModelError(
        f"{where} scales its rotary embedding in a way that is not known ({what}): take the "
        "model's safetensors"
    )
