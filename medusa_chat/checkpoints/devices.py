"""Devices: which device and precision to use, how many threads, free memory, and out of memory."""

import ctypes
import gc
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from medusa_chat.checkpoints.machine import cpu_name, has_nvidia_driver
from medusa_chat.checkpoints.memory_needs import PRECISIONS
from medusa_chat.errors import DeviceError, ModelError, OutOfMemoryError, UsageError
from medusa_chat.messages import DeviceMemory
from medusa_chat.units import gb

# Bytes of weights that pay for one more thread: with fewer, synchronising costs more than the
# thread saves (2 cores, fp32: one and two threads are equal at 24 MB, two are 1.4 times as fast at
# 80 MB). In our C library synchronising takes a tenth of the time.
BYTES_PER_THREAD = 32 * 2**20
BYTES_PER_NATIVE_THREAD = 4 * 2**20

_most_threads = 0  # torch's default, or one less (`leave_one_core`); 0: not read yet


def choose_device(name: str) -> torch.device:
    """The device that --device names; "auto" prefers CUDA, then MPS, then the CPU. Raises
    UsageError for an unknown name, and DeviceError for a device that this machine lacks."""
    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(
            f"device is {name!r}, but torch finds no CUDA GPU: run medusa-chat doctor"
        )
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device is 'mps', but this machine has none: choose auto or cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps") from error


def describe_device(device: torch.device) -> str:
    """The name of the device; for a CPU with the threads that this process may use, on which step
    times depend (one fewer beside a page)."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"mps ({platform.machine()})"
    threads = most_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cuda_remedy() -> list[str]:
    """A remedy where there is an NVIDIA driver that torch cannot use; empty elsewhere."""
    is_hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")  # by the user
    if is_hidden or torch.cuda.is_available() or not has_nvidia_driver():
        return []
    version, cuda = torch.__version__, torch.version.cuda
    release = version.partition("+")[0]
    if cuda is not None:
        remedy = "update the NVIDIA driver, or give the container the GPU (--gpus all)"
        return [f"torch {version} with CUDA {cuda} finds no GPU: {remedy}"]
    remedy = f"install torch {release} with the line that pytorch.org/get-started/locally gives"
    if sys.platform == "linux":
        remedy = f"pip install --force-reinstall torch=={release}"
    return [f"there is an NVIDIA driver, but torch {version} is a CPU-only build: {remedy}"]


def has_fast_bf16() -> bool:
    """Whether this CPU multiplies bf16 itself (AMX, or AVX-512 with bf16), which is at least twice
    as fast as fp32, in our C code, in torch's and in training."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


def choose_precision(name: str, device: torch.device) -> tuple[str, str]:
    """The precision that --precision names and a sentence that says why. Raises UsageError for an
    unknown precision."""
    if name not in PRECISIONS:
        raise UsageError(f"precision is {name!r}: choose one of {', '.join(PRECISIONS)}")
    if name != "auto":
        return name, f"precision {name} as asked"
    if device.type == "cuda":
        has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        chosen = "bf16" if has_bf16 else "fp16"
        return chosen, f"precision {chosen}: what this GPU computes fastest"
    if device.type == "mps":
        return "fp16", "precision fp16: what MPS computes fastest"
    if has_fast_bf16():
        return "bf16", "precision bf16: this CPU multiplies it at least twice as fast as fp32"
    return "fp32", "precision fp32: this CPU has no fast bf16"


# messages of torch's allocators that raise a plain RuntimeError: CPU on Linux, macOS and Windows;
# CUDA libraries; MPS
OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",
    "not enough memory",
    "DefaultCPUAllocator",
    "CUDA out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "MPS backend out of memory",
)


def is_exhausted(error: BaseException | None) -> bool:
    """Whether an error means that memory ran out, whatever its type."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        message in str(error) for message in OUT_OF_MEMORY_MESSAGES
    )


@contextmanager
def refuse_out_of_memory(advice: Callable[[], str]) -> Iterator[None]:
    """Turn running out of memory into OutOfMemoryError. advice: its message, what did not fit and
    what would."""
    try:
        yield
    except (RuntimeError, MemoryError, ModelError) as error:
        if not is_exhausted(error.__cause__ if isinstance(error, ModelError) else error):
            raise
        error.__traceback__ = None  # its frames hold the tensors allocated so far
        release()
        raise OutOfMemoryError(advice()) from None


def release() -> None:
    """Return unused memory to the system: models hold reference cycles, and CUDA caches freed
    memory."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)  # glibc's


def device_memory(device: torch.device, held: int = 0, with_swap: bool = False) -> DeviceMemory:
    """How much memory a device has and how much of it is free.

    held: bytes of a model that will be freed first; they count as free. with_swap: free swap space
    of the CPU counts too. MPS shares the CPU's memory.
    """
    precision, _ = choose_precision("auto", device)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        pool = torch.cuda.memory_reserved(device) if held else 0  # which holds that model
        return DeviceMemory(str(device), free + pool, total, precision)
    memory = psutil.virtual_memory()
    free = min(memory.available + held, memory.total)
    free += _free_swap() if with_swap else 0
    return DeviceMemory(str(device), free, memory.total, precision)


def _free_swap() -> int:
    """Bytes; 0 where the system does not say, such as Windows without performance counters."""
    try:
        return int(psutil.swap_memory().free)
    except Exception:  # psutil passes on whatever the system raises
        return 0


def held_bytes(*modules: Any) -> int:
    """Bytes of the storages of these modules, each counted once: parameters, buffers, the state
    that bitsandbytes keeps with its weights, and packed weights. Offloaded ones are not counted."""
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
    """A key that identifies a storage, and its bytes; oneDNN's storages have no address."""
    if tensor.layout is not torch.strided:
        return id(tensor), tensor.numel() * tensor.element_size()
    storage = tensor.untyped_storage()
    return storage.data_ptr() or id(tensor), storage.nbytes()


def leave_one_core() -> None:
    """Keep one core free for the page and the browser.

    Compute threads wait for each other by spinning: while a browser drew on one of two cores, a
    step of the demo took nine times as long.
    """
    global _most_threads
    _most_threads = max(1, most_threads() - 1)


def most_threads() -> int:
    """The threads that a large model gets."""
    global _most_threads
    _most_threads = _most_threads or torch.get_num_threads()
    return _most_threads


def settle_threads(*modules: nn.Module, beside: int = 0) -> str:
    """Set torch's threads for steps that read these modules' parameters, and so many bytes beside
    -> a sentence about it."""
    size = _bytes_of(modules) + beside
    threads = min(most_threads(), max(1, round(size / BYTES_PER_THREAD)))
    torch.set_num_threads(threads)
    return f"{threads} of {most_threads()} CPU threads; a step reads {gb(size)}"


def native_threads(*modules: nn.Module, beside: int = 0) -> int:
    """How many threads of our C library read these modules' parameters in a step, and so many bytes
    beside."""
    size = _bytes_of(modules) + beside
    return min(most_threads(), max(1, round(size / BYTES_PER_NATIVE_THREAD)))


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let torch use this many threads inside the block. While our C library runs, torch gets one:
    more would spin on the same cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _bytes_of(modules: Iterable[nn.Module]) -> int:
    return sum(p.nbytes for module in modules for p in module.parameters() if not p.is_meta)
