"""Memory: how much a model holds, how much is free, and what running out of it looks like."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from medusa_chat.errors import OutOfMemoryError

if TYPE_CHECKING:
    import torch

# what torch's allocators say where they raise a plain RuntimeError: CPU on Linux, macOS, Windows;
# libraries of CUDA; MPS
SIGNS = (
    "can't allocate memory",
    "not enough memory",
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


def is_exhausted(error: BaseException) -> bool:
    """Whether an error means that memory ran out, however it is called."""
    import torch

    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


@contextmanager
def fitting(advice: Callable[[], str]) -> Iterator[None]:
    """Turn out of memory into a refusal; advice: that one line, what was to fit and what would."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_exhausted(error):
            raise
        error.__traceback__ = None  # its frames hold what was allocated so far
        release()
        raise OutOfMemoryError(advice()) from None


def release() -> None:
    """Give back what nothing refers to: models hold cycles, and CUDA keeps what was freed."""
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def free_bytes(device: "torch.device") -> int | None:
    """What can be allocated on a device now; None where that is not told."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "cpu":
        import psutil

        return int(psutil.virtual_memory().available + psutil.swap_memory().free)
    return None


def held_bytes(*modules: Any) -> int:
    """Bytes of every storage of these modules once: parameters, buffers, what bitsandbytes keeps
    beside its weights, and weights laid out anew for the CPU. What was offloaded is not counted."""
    storages: dict[int, int] = {}
    for module in modules:
        for part in module.modules():
            for tensor in _tensors(part):
                place, size = _storage(tensor)
                storages[place] = size
    return sum(storages.values())


def _tensors(module: Any) -> "Iterable[torch.Tensor]":
    own = [*module._parameters.values(), *module._buffers.values(), getattr(module, "packed", None)]
    for tensor in filter(_is_there, own):
        yield tensor
        state = getattr(tensor, "quant_state", None)  # bitsandbytes, 4 bit
        inner = getattr(state, "state2", None)
        beside = [getattr(s, n, None) for s in (state, inner) for n in ("absmax", "code", "offset")]
        yield from filter(_is_there, [*beside, getattr(tensor, "SCB", None)])  # SCB: 8 bit


def _is_there(tensor: Any) -> bool:
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"


def _storage(tensor: "torch.Tensor") -> tuple[int, int]:
    """What tells a storage from others, and its bytes; oneDNN's have no address."""
    import torch

    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id(tensor), storage.nbytes()
