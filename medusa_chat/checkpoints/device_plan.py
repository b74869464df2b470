"""DevicePlan: the devices and the precision that a checkpoint will run with, and why."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import infer_auto_device_map
from accelerate.utils import CustomDtype
from torch import nn
from transformers import AutoModelForCausalLM

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.devices import choose_device, choose_precision, device_memory
from medusa_chat.checkpoints.kernel_trial import multiplies_int8
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.machine import this_cpu
from medusa_chat.checkpoints.memory_needs import (
    QUANTISED,
    SHARE,
    Estimate,
    MemoryNeeds,
    smaller_precisions,
)
from medusa_chat.checkpoints.model_sizes import LONGEST, short_length, usual_context
from medusa_chat.errors import ModelError, OutOfMemoryError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.units import gb

SHORTEST_CONTEXT = 16
UNBUILT = 1_000_000_000  # bytes of a packed file that is unpacked where our C cannot be built

Place = int | str  # the number of a GPU, or "cpu" for main memory


@dataclass(frozen=True)
class LayerSplit:
    """The layers of a model that fits on no single GPU, on several or in main memory.

    accelerate places whole decoder layers and moves activations between them. Keys and values of a
    layer are on the device that computes it: the first GPU for a layer in main memory.
    device_map: module -> the device of its weights. why: a sentence for the page."""

    precision: str
    device_map: Mapping[str, Place]
    why: str


@dataclass(frozen=True)
class DevicePlan:
    """device: of embeddings, heads and logits. context: tokens of the KV cache. notes: why.
    needs: the memory it takes there. device_map: module -> device where the layers are split over
    several devices; None for all on `device`. is_packed: whether a GGUF file is used as it is;
    unpacks: what is said before one is unpacked."""

    device: torch.device
    precision: str
    context: int
    notes: tuple[str, ...]
    needs: MemoryNeeds
    device_map: Mapping[str, int | str] | None = None
    is_packed: bool = False
    unpacks: str = ""

    @property
    def is_native(self) -> bool:
        """Whether the C pass will decode it, judging by the config."""
        return self.needs.runs_in_c(self.precision)

    @property
    def words(self) -> str:
        """The names of all its devices."""
        if self.device_map is None:
            return str(self.device)
        names = dict.fromkeys(self.device_map.values())
        return " + ".join(n if isinstance(n, str) else f"cuda:{n}" for n in names)

    def advice(self) -> str:
        """One line for a load that ran out of memory."""
        return self.needs.advice(self.precision)


def plan_device(request: LoadRequest, checkpoint: Checkpoint, config: Any) -> DevicePlan:
    """One device, at the requested precision or, for "auto", the best one that fits; with --device
    auto, several devices for a model that fits on no single one. config: the backbone's
    transformers config. Raises OutOfMemoryError where main memory cannot hold it, and UsageError
    and DeviceError for options that cannot be met."""
    device = choose_device(request.device)
    context, rope = choose_context(request.max_context, config.get_text_config())
    needs = MemoryNeeds(
        checkpoint,
        context,
        str(device),
        _free_bytes(device),
        this_cpu(),
        multiplies_int8(device),
    )
    preferred, reason = choose_precision(request.precision, device)
    is_open = request.precision == "auto"
    if checkpoint.weights.stored:
        return _plan_file(request, needs, rope)
    chosen = needs.choose(preferred) if is_open else preferred
    if chosen is not None and needs.fits(chosen):
        why = reason
        if chosen != preferred:
            said = needs.measured(chosen)
            why = f"precision {chosen}: the best that fits here{said and f' ({said})'}"
        return DevicePlan(device, chosen, context, (why, *rope, *needs.remarks(chosen)), needs)
    if device.type == "cpu":
        raise OutOfMemoryError(needs.advice(preferred))
    tried = (preferred, *smaller_precisions(preferred)) if is_open else (preferred,)
    if request.device == "auto" and (split := _split(config, needs, tried)) is not None:
        notes = (split.why, *rope)
        return DevicePlan(device, split.precision, context, notes, needs, split.device_map)
    why = "it may not fit in this device's memory"  # the estimate may be wrong: try it
    return DevicePlan(device, tried[-1], context, (reason, why, *rope), needs)


def _plan_file(request: LoadRequest, needs: MemoryNeeds, rope: tuple[str, ...]) -> DevicePlan:
    """How a GGUF file runs: as it is by our C on a CPU, else unpacked in memory; never rounded.
    Raises as plan_device does, and ModelError for a large one where our C cannot be built."""
    found, device = needs.found, torch.device(needs.device)
    refuse_rounding(found, request.precision)
    is_open = request.precision == "auto"
    if is_open and needs.is_used_as_it_is:
        precision = found.weights.stored
        if not needs.fits(precision):
            if device.type != "cpu" and request.device == "auto":
                return _file_on_cpu(request, needs, rope, "as it is")
            raise OutOfMemoryError(needs.advice(precision))
        why = f"precision {precision}: the file as it is, its own blocks are multiplied"
        return DevicePlan(device, precision, needs.context, (why, *rope), needs, is_packed=True)
    precision, reason = choose_precision(request.precision, device)
    fits, parts = needs.fits(precision), needs.at(precision)
    said = f"{found.source.name} ({found.weights.stored}, {gb(found.weights.bytes)})"
    takes = f"{precision} in memory{f', which takes {gb(parts.total)}' if parts else ''}"
    if not fits and is_open and request.device == "auto" and device.type != "cpu":
        return _file_on_cpu(request, needs, rope, f"as {takes}")
    if not fits and device.type == "cpu":
        raise OutOfMemoryError(needs.advice(precision))
    is_in_blocks = found.weights.packed + found.weights.stacked[0] > 0
    if is_in_blocks:
        _refuse_unbuilt(needs, said)
        reason = f"{said} is unpacked to {takes}"
    tried = () if fits else ("it may not fit in this device's memory",)
    notes = (reason, *tried, *rope)
    unpacks = reason if is_in_blocks else ""
    return DevicePlan(device, precision, needs.context, notes, needs, unpacks=unpacks)


def _file_on_cpu(
    request: LoadRequest, needs: MemoryNeeds, rope: tuple[str, ...], how: str
) -> DevicePlan:
    """How a GGUF file larger than the card runs: by our C, as it is."""
    found = needs.found
    free = _free_bytes(torch.device("cpu"))
    on_cpu = replace(needs, device="cpu", free=free, has_int8=False)
    plan = _plan_file(replace(request, device="cpu"), on_cpu, rope)
    said = f"{found.source.name} ({found.weights.stored}, {gb(found.weights.bytes)})"
    why = f"{said} does not fit on {needs.device} {how}: it runs on the CPU"
    return replace(plan, notes=(why, *plan.notes))


def refuse_rounding(found: Checkpoint, precision: str) -> None:
    """Raises UsageError for a precision that would round a GGUF file."""
    if found.weights.stored and precision in QUANTISED:
        raise UsageError(
            f"{found.source.name} is {found.weights.stored}, which is never rounded again: "
            f"--precision {precision} is for 16-bit checkpoints, give auto (the file as it is), "
            "bf16, fp16 or fp32"
        )


def _refuse_unbuilt(needs: MemoryNeeds, said: str) -> None:
    """Raises ModelError for a packed file that only our C could run as it is."""
    if needs.device == "cpu" and not needs.cpu.has_compiler and needs.found.weights.bytes > UNBUILT:
        raise ModelError(
            f"{said} needs our C library, and there is no C compiler here to build it: "
            f"{native_build.REMEDY}, or take a file under 1 GB"
        )


def choose_context(asked: int | None, config: Any) -> tuple[int, tuple[str, ...]]:
    """The number of tokens that the KV cache holds, as requested or by default, and notes on
    longrope. config: the text model's transformers config. Raises UsageError for a number outside
    16 to the model's limit."""
    limit = int(getattr(config, "max_position_embeddings", None) or LONGEST)
    values = config.to_dict()
    short = short_length(values) or limit
    if asked is not None and not SHORTEST_CONTEXT <= asked <= limit:
        raise UsageError(
            f"max-context is {asked}: give a whole number from {SHORTEST_CONTEXT} to {limit}"
        )
    context = usual_context(limit, values) if asked is None else asked
    if short >= limit:
        return context, ()
    if context > short:
        return context, (f"longrope uses its long factors: the context is over {short} tokens",)
    return context, (f"longrope uses its short factors: a --max-context over {short} changes it",)


def _split(config: Any, needs: MemoryNeeds, precisions: tuple[str, ...]) -> LayerSplit | None:
    """Split the layers over all CUDA devices and main memory; None if they do not fit."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus: dict[Place, int] = {i: _free_bytes(torch.device("cuda", i)) or 0 for i in range(count)}
    main = _free_bytes(torch.device("cpu")) or 0
    return split_layers(config, needs, precisions, gpus, main) if gpus else None


def _free_bytes(device: torch.device) -> int | None:
    """None on MPS, which may not use all free memory and does not report its limit."""
    return None if device.type == "mps" else device_memory(device, with_swap=True).free


def split_layers(
    config: Any,
    needs: MemoryNeeds,
    precisions: tuple[str, ...],
    gpus: Mapping[Place, int],
    main: int,
) -> LayerSplit | None:
    """The first split that fits: over several GPUs at one of `precisions`, otherwise with layers in
    main memory, which works for unquantised weights only. gpus, main: free bytes. None if none
    fits."""
    model = _empty(config)
    for precision, memory in _ways(precisions, gpus, main):
        parts = needs.at(precision)
        if parts is None:
            return None
        placement = device_map(model, precision, memory, parts)
        if placement is not None:
            return LayerSplit(precision, placement, _why(precision, placement, parts))
    return None


def _ways(
    precisions: tuple[str, ...], gpus: Mapping[Place, int], main: int
) -> Iterator[tuple[str, dict[Place, int]]]:
    if len(gpus) > 1:
        yield from ((precision, {**gpus}) for precision in precisions)
    for precision in precisions:
        if precision not in ("int8", "nf4"):
            yield precision, {**gpus, "cpu": main}


def device_map(
    model: Any, precision: str, memory: Mapping[Place, int], parts: Estimate
) -> dict[str, Place] | None:
    """Module -> device, filling the devices of `memory` (free bytes) in order; None where the
    weights do not fit. model: without weights. parts: its memory estimate, for what the GPUs need
    besides the weights."""
    gpus = [place for place in memory if place != "cpu"]
    # layers in main memory have their cache on the first GPU, and their number is not known yet
    share = parts.cache if "cpu" in memory else parts.cache * 5 // (4 * len(gpus))
    limits = {place: int(SHARE * free) for place, free in memory.items()}
    for place in gpus:
        limits[place] -= share + parts.gaps // len(gpus)
    limits[gpus[0]] -= parts.heads + parts.step
    kinds = {"fp32": torch.float32, "int8": torch.int8, "nf4": CustomDtype.INT4}
    kept = _not_quantised(model) if precision in ("int8", "nf4") else []
    placement = infer_auto_device_map(
        model,
        {place: max(0, limit) for place, limit in limits.items()},
        no_split_module_classes=list(model._no_split_modules or ()),
        dtype=kinds.get(precision, torch.float16),
        special_dtypes=dict.fromkeys(kept, torch.float16),
    )
    return None if "disk" in placement.values() else dict(placement)


def _not_quantised(model: Any) -> list[str]:
    """Names of the weights that bitsandbytes leaves in 16 bits."""
    head = model.get_output_embeddings()
    linears = {f"{name}.weight" for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    linears -= {f"{name}.weight" for name, m in model.named_modules() if m is head}
    return [name for name, _ in model.named_parameters() if name not in linears]


def _empty(config: Any) -> Any:
    """The model without weights."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def _why(precision: str, placement: Mapping[str, Place], parts: Estimate) -> str:
    counts: dict[Place, int] = {}
    for place in placement.values():
        counts[place] = counts.get(place, 0) + 1
    where = ", ".join(
        f"{count} modules on cuda:{place}" if place != "cpu" else f"{count} modules in main memory"
        for place, count in counts.items()
    )
    slow = " (slow: copied to the GPU at every step)" if "cpu" in counts else ""
    return f"no single GPU has room for {gb(parts.total)} at {precision}: {where}{slow}"
