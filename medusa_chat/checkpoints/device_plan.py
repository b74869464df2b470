"""Placing: on which device a checkpoint will lie, at which precision, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from medusa_chat.checkpoints.devices import choose_device, choose_precision, this_cpu
from medusa_chat.checkpoints.layer_split import Spread, spread
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory import free_bytes
from medusa_chat.checkpoints.memory_fit import Needs, smaller
from medusa_chat.errors import OutOfMemoryError, UsageError
from medusa_chat.messages import LoadRequest

if TYPE_CHECKING:
    import torch

DEFAULT_CONTEXT = 8192


@dataclass(frozen=True)
class Placement:
    """device: of embeddings, heads and logits. notes: why. device_map: module -> device where the
    layers lie on several; None for all on `device`. needs: what it takes there."""

    device: "torch.device"
    precision: str
    context: int
    notes: tuple[str, ...]
    needs: Needs
    device_map: Mapping[str, int | str] | None = None

    @property
    def is_native(self) -> bool:
        """Whether our C code will decode it, as far as its config tells."""
        return self.needs.runs_in_c(self.precision)

    @property
    def words(self) -> str:
        """The device, or all of them."""
        if self.device_map is None:
            return str(self.device)
        places = dict.fromkeys(self.device_map.values())
        return " + ".join(p if isinstance(p, str) else f"cuda:{p}" for p in places)

    def advice(self) -> str:
        """One line for a load that ran out of memory."""
        return self.needs.advice(self.precision)


def place(request: LoadRequest, found: Checkpoint, config: Any) -> Placement:
    """Where to put it: one device, at the precision asked for or, at "auto", the best that fits
    there; with --device auto, several devices where it fits on no single one. config: the
    backbone's, of transformers. Raises OutOfMemoryError where main memory cannot hold it."""
    device = choose_device(request.device)
    context = choose_context(request.max_context, config.get_text_config())
    needs = Needs(found, context, str(device), free_bytes(device), this_cpu())
    preferred, reason = choose_precision(request.precision, device, needs.runs_in_c("bf16"))
    is_open = request.precision == "auto"
    chosen = needs.choose(preferred) if is_open else preferred
    if chosen is not None and needs.fits(chosen):
        why = reason if chosen == preferred else f"precision {chosen}: the largest that fits here"
        return Placement(device, chosen, context, (why, *needs.remarks(chosen)), needs)
    if device.type == "cpu":
        raise OutOfMemoryError(needs.advice(preferred))
    tried = (preferred, *smaller(preferred)) if is_open else (preferred,)
    if request.device == "auto" and (wide := _spread(config, needs, tried)) is not None:
        return Placement(device, wide.precision, context, (wide.why,), needs, wide.device_map)
    why = "it may not fit in this device's memory"  # the estimate may be wrong: it is tried
    return Placement(device, tried[-1], context, (reason, why), needs)


def choose_context(asked: int | None, config: Any) -> int:
    """How many tokens the cache holds: as asked, else the model's own up to 8192."""
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if asked is None:
        return min(limit, DEFAULT_CONTEXT)
    if not 16 <= asked <= limit:
        raise UsageError(f"max-context is {asked}: give a whole number from 16 to {limit}")
    return asked


def _spread(config: Any, needs: Needs, precisions: tuple[str, ...]) -> Spread | None:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    gpus = {i: free_bytes(torch.device("cuda", i)) or 0 for i in range(count)}
    main = free_bytes(torch.device("cpu")) or 0
    return spread(config, needs, precisions, gpus, main) if gpus else None
