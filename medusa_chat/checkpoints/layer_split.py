"""LayerSplit: the layers of a model that fits on no single GPU, on several or in main memory.

accelerate places whole decoder layers and moves what passes between them. Keys and values of a
layer lie where the layer computes: for one that is kept in main memory that is the first GPU.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import CustomDtype
from torch import nn
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints.memory_estimate import Estimate
from medusa_chat.checkpoints.memory_fit import SHARE, MemoryNeeds
from medusa_chat.units import gb

Place = int | str  # the number of a GPU, or "cpu" for main memory


@dataclass(frozen=True)
class LayerSplit:
    """device_map: module -> where its weights lie. why: a sentence for the page."""

    precision: str
    device_map: Mapping[str, Place]
    why: str


def split_layers(
    config: Any,
    needs: MemoryNeeds,
    precisions: tuple[str, ...],
    gpus: Mapping[int, int],
    main: int,
) -> LayerSplit | None:
    """The first way in which it fits: over several GPUs at one of `precisions`, else with layers
    in main memory, which only unquantised weights can be. gpus, main: free bytes. None for none."""
    model = _empty(config)
    for precision, memory in _ways(precisions, gpus, main):
        parts = needs.at(precision)
        if parts is None:
            return None
        found = device_map(model, precision, memory, parts)
        if found is not None:
            return LayerSplit(precision, found, _why(precision, found, parts))
    return None


def _ways(
    precisions: tuple[str, ...], gpus: Mapping[int, int], main: int
) -> Iterator[tuple[str, dict[Place, int]]]:
    if len(gpus) > 1:
        yield from ((precision, dict(gpus)) for precision in precisions)
    for precision in precisions:
        if precision not in ("int8", "nf4"):
            yield precision, {**gpus, "cpu": main}


def device_map(
    model: Any, precision: str, memory: Mapping[Place, int], parts: Estimate
) -> dict[str, Place] | None:
    """Module -> device, filling the devices of `memory` (free bytes) in their order; None where
    the weights do not fit. model: without its weights. parts: its estimate, for what besides the
    weights must find room on the GPUs."""
    gpus = [place for place in memory if place != "cpu"]
    # a layer in main memory has its cache on the first GPU, and no one knows yet how many will be
    share = parts.cache if "cpu" in memory else parts.cache * 5 // (4 * len(gpus))
    limits = {place: int(SHARE * free) for place, free in memory.items()}
    for place in gpus:
        limits[place] -= share + parts.gaps // len(gpus)
    limits[gpus[0]] -= parts.heads + parts.step
    kinds = {"fp32": torch.float32, "int8": torch.int8, "nf4": CustomDtype.INT4}
    kept = _not_quantised(model) if precision in ("int8", "nf4") else []
    found = infer_auto_device_map(
        model,
        {place: max(0, limit) for place, limit in limits.items()},
        no_split_module_classes=list(model._no_split_modules or ()),
        dtype=kinds.get(precision, torch.float16),
        special_dtypes=dict.fromkeys(kept, torch.float16),
    )
    return None if "disk" in found.values() else dict(found)


def _not_quantised(model: Any) -> list[str]:
    """Names of the weights that bitsandbytes leaves in 16 bits."""
    head = model.get_output_embeddings()
    linears = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears -= {f"{name}.weight" for name, m in model.named_modules() if m is head}
    return [name for name, _ in model.named_parameters() if name not in linears]


def _empty(config: Any) -> Any:
    """The model as modules only."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def _why(precision: str, found: Mapping[str, Place], parts: Estimate) -> str:
    counts: dict[Place, int] = {}
    for place in found.values():
        counts[place] = counts.get(place, 0) + 1
    where = ", ".join(
        f"{count} modules on cuda:{place}" if place != "cpu" else f"{count} modules in main memory"
        for place, count in counts.items()
    )
    slow = " (slow: copied to the GPU at every step)" if "cpu" in counts else ""
    return f"no single GPU has room for {gb(parts.total)} at {precision}: {where}{slow}"
