"""Devices: where to compute, and at which precision each device computes fastest."""

import os
import platform
import sys

import torch

from medusa_chat.checkpoints.cpu import cpu_name
from medusa_chat.checkpoints.gpus import has_nvidia_driver
from medusa_chat.checkpoints.precision import PRECISIONS
from medusa_chat.decoding.backends import cpu_threads
from medusa_chat.errors import DeviceError, UsageError


def choose_device(name: str) -> torch.device:
    """The device that --device names; "auto" takes CUDA, then MPS, then the CPU. Raises UsageError
    for another word, and DeviceError for a device that this machine lacks."""
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
    """The device by name; for a CPU with the threads that this process may use, fewer beside a
    page: step times depend on them."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "mps":
        return f"mps ({platform.machine()})"
    threads = cpu_threads.most()
    return f"{cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def cuda_remedy() -> list[str]:
    """What to do where there is an NVIDIA driver and torch cannot use it; empty elsewhere."""
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
