"""DevicePlan: on which device a checkpoint will run, at which precision, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from medusa_chat.checkpoints.cpu import this_cpu
from medusa_chat.checkpoints.devices import choose_device, choose_precision
from medusa_chat.checkpoints.layer_split import LayerSplit, split_layers
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory import device_memory
from medusa_chat.checkpoints.memory_fit import MemoryNeeds
from medusa_chat.checkpoints.precision import smaller_precisions
from medusa_chat.checkpoints.usual_context import LONGEST, short_length, usual_context
from medusa_chat.errors import OutOfMemoryError, UsageError
from medusa_chat.messages import LoadRequest

SHORTEST_CONTEXT = 16
NUMBERS = "precision bf16: the file's own numbers are multiplied, which is fast on any CPU"


@dataclass(frozen=True)
class DevicePlan:
    """device: of embeddings, heads and logits. context: tokens of the KV cache. notes: why.
    needs: the memory it takes there. device_map: module -> device where the layers are split over
    several devices; None for all on `device`."""

    device: torch.device
    precision: str
    context: int
    notes: tuple[str, ...]
    needs: MemoryNeeds
    device_map: Mapping[str, int | str] | None = None

    @property
    def is_native(self) -> bool:
        """Whether our C code will decode it, as far as its config tells."""
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


def plan_device(request: LoadRequest, found: Checkpoint, config: Any) -> DevicePlan:
    """One device, at the precision asked for or, at "auto", the best that fits there; with
    --device auto, several devices for a model that fits on no single one. config: the backbone's,
    of transformers. Raises OutOfMemoryError where main memory cannot hold it, UsageError and
    DeviceError for options that cannot be met."""
    device = choose_device(request.device)
    context, rope = choose_context(request.max_context, config.get_text_config())
    needs = MemoryNeeds(found, context, str(device), _free_bytes(device), this_cpu())
    preferred, reason = choose_precision(request.precision, device)
    is_open = request.precision == "auto"
    if is_open and preferred == "fp32" and needs.multiplies_numbers:
        preferred, reason = "bf16", NUMBERS
    chosen = needs.choose(preferred) if is_open else preferred
    if chosen is not None and needs.fits(chosen):
        why = reason if chosen == preferred else f"precision {chosen}: the largest that fits here"
        return DevicePlan(device, chosen, context, (why, *rope, *needs.remarks(chosen)), needs)
    if device.type == "cpu":
        raise OutOfMemoryError(needs.advice(preferred))
    tried = (preferred, *smaller_precisions(preferred)) if is_open else (preferred,)
    if request.device == "auto" and (split := _split(config, needs, tried)) is not None:
        notes = (split.why, *rope)
        return DevicePlan(device, split.precision, context, notes, needs, split.device_map)
    why = "it may not fit in this device's memory"  # the estimate may be wrong: it is tried
    return DevicePlan(device, tried[-1], context, (reason, why, *rope), needs)


def choose_context(asked: int | None, config: Any) -> tuple[int, tuple[str, ...]]:
    """How many tokens the KV cache holds, as asked or as usual, and what to tell of longrope.
    config: a text model's, of transformers. Raises UsageError for a number outside 16 to the
    model's limit."""
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
        return context, (f"longrope's long factors at every position: the context is over {short}",)
    return context, (f"longrope's short factors: a --max-context over {short} takes its long ones",)


def _split(config: Any, needs: MemoryNeeds, precisions: tuple[str, ...]) -> LayerSplit | None:
    """The layers over all CUDA devices and main memory; None where they do not fit either."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = {i: _free_bytes(torch.device("cuda", i)) or 0 for i in range(count)}
    main = _free_bytes(torch.device("cpu")) or 0
    return split_layers(config, needs, precisions, gpus, main) if gpus else None


def _free_bytes(device: torch.device) -> int | None:
    """None on MPS, which may not use all memory that is free and does not tell its limit."""
    return None if device.type == "mps" else device_memory(device, with_swap=True).free
