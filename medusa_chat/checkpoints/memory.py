"""Memory: how much a model holds, how much a device has free, and how running out is told."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from medusa_chat.errors import ModelError, OutOfMemoryError
from medusa_chat.messages import DeviceMemory

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


def is_exhausted(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out, however it is called."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


@contextmanager
def refuse_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Turn out of memory into a refusal; advice: that one line, what was to fit and what would."""
    try:
        yield
    except (RuntimeError, MemoryError, ModelError) as error:
        if not is_exhausted(error.__cause__ if isinstance(error, ModelError) else error):
            raise
        error.__traceback__ = None  # its frames hold what was allocated so far
        release()
        raise OutOfMemoryError(advice()) from None


def release() -> None:
    """Give back what nothing refers to: models hold cycles, and CUDA keeps what was freed."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def device_memory(device: torch.device, held: int = 0, with_swap: bool = False) -> DeviceMemory:
    """How much memory a device has and how much of it is free.

    held: bytes of a model that will be gone first; they count as free. with_swap: count free swap
    space of the CPU as free too. MPS shares the CPU's memory.
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pool = torch.cuda.memory_reserved(device) if held else 0  # it holds all of that model
        return DeviceMemory(str(device), free + pool, total)
    memory = psutil.virtual_memory()
    free = min(memory.available + held, memory.total)
    return DeviceMemory(str(device), free + (_free_swap() if with_swap else 0), memory.total)


def _free_swap() -> int:
    """Bytes; 0 where the system does not tell, as Windows without its performance counters."""
    try:
        return int(psutil.swap_memory().free)
    except Exception:  # psutil passes on whatever the system raises
        return 0


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


def _tensors(module: Any) -> Iterable[torch.Tensor]:
    own = [*module._parameters.values(), *module._buffers.values(), getattr(module, "packed", None)]
    for tensor in filter(_is_there, own):
        yield tensor
        state = getattr(tensor, "quant_state", None)  # bitsandbytes, 4 bit
        inner = getattr(state, "state2", None)
        beside = [getattr(s, n, None) for s in (state, inner) for n in ("absmax", "code", "offset")]
        yield from filter(_is_there, [*beside, getattr(tensor, "SCB", None)])  # SCB: 8 bit


def _is_there(tensor: Any) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.device.type != "meta"


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """The identity of a storage, and its bytes; oneDNN's storages have no address."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id(tensor), storage.nbytes()
