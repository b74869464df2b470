"""Where to compute and in which number format."""

import platform
from pathlib import Path
from typing import TYPE_CHECKING

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.memory_estimate import Cpu
from medusa_chat.errors import DeviceError, UsageError
from medusa_chat.messages import DeviceMemory

if TYPE_CHECKING:
    import torch

PRECISIONS = ("auto", "fp32", "bf16", "fp16", "int8", "nf4")


def choose_device(name: str) -> "torch.device":
    """The device that --device names; "auto" takes CUDA, then MPS, then the CPU."""
    import torch

    if name == "auto":
        mps = torch.backends.mps.is_available()
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    kind = name.partition(":")[0]
    if kind not in ("cpu", "cuda", "mps"):
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps")
    if kind == "cuda" and not torch.cuda.is_available():
        raise DeviceError(f"device is {name!r}, but torch sees no CUDA GPU: see medusa-chat doctor")
    if kind == "mps" and not torch.backends.mps.is_available():
        raise DeviceError("device is 'mps', but this machine has none")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UsageError(f"device is {name!r}: choose auto, cpu, cuda, cuda:N or mps") from error


def describe_device(device: "torch.device") -> str:
    """The device by name; for a CPU with its threads, on which step times depend too."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"mps ({platform.machine()})"
    threads = torch.get_num_threads()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cpu_name() -> str:
    """The processor's name, as Linux or the standard library gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux: the standard library's word for it
    return platform.processor() or platform.machine()


def this_cpu() -> Cpu:
    """What copies of weights this machine's CPU makes. Linux says what it can do."""
    try:
        told = Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        told = ""
    return Cpu("amx_tile" in told, native_build.compiler() is not None)


def choose_precision(name: str, device: "torch.device", runs_in_c: bool = False) -> tuple[str, str]:
    """The precision that --precision names and a sentence that says why. runs_in_c: whether our C
    code would decode the model in bf16 on a CPU."""
    import torch

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
    library = native_build.library() if runs_in_c else None
    if library is not None and library.multiplies_half():
        return "bf16", "precision bf16: this CPU multiplies it twice as fast as fp32"
    if torch.cpu._is_amx_tile_supported():
        return "bf16", "precision bf16: this CPU has AMX, where a tree costs little more than a row"
    return "fp32", "precision fp32: this CPU has no fast bf16"


def device_memory(name: str, held: int) -> DeviceMemory:
    """Memory of the device that --device names. held: bytes that the present model takes of it."""
    import psutil
    import torch

    device = choose_device(name)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return DeviceMemory(str(device), free + torch.cuda.memory_reserved(device), total)
    memory = psutil.virtual_memory()  # the CPU's own, which MPS shares
    return DeviceMemory(str(device), min(memory.available + held, memory.total), memory.total)
