"""What torch says of this machine's processor and devices, for `medusa-chat doctor`."""

import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from medusa_chat.checkpoints.devices import has_fast_bf16


def processor() -> dict[str, Any]:
    """The processor as torch sees it; "fast bf16": whether its matrix products are fast."""
    return {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "fast bf16": has_fast_bf16(),
        "fast fp16": _says_yes("_is_mkldnn_fp16_supported"),
        "amx": _says_yes("_is_amx_tile_supported"),
    }


def _says_yes(question: str) -> bool | None:
    """Ask one of torch's private checks; None where this build does not have it."""
    module = torch.cpu if question.startswith("_is_amx") else torch.ops.mkldnn
    try:
        return bool(getattr(module, question)())
    except (AttributeError, RuntimeError):
        return None


def devices(problems: list[str]) -> dict[str, Any]:
    """The devices that torch sees. problems: a remedy is added where a GPU is not usable."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if _has_nvidia_driver() and not torch.cuda.is_available():
        problems.append(_cuda_remedy(torch.__version__, torch.version.cuda))
    return {
        "torch is built for": torch.version.cuda or getattr(torch.version, "hip", None) or "cpu",
        "nvidia driver": _has_nvidia_driver(),
        "cuda": names,
        "mps": torch.backends.mps.is_available(),
    }


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))


def _cuda_remedy(version: str, cuda: str | None) -> str:
    release = version.partition("+")[0]
    if cuda is not None:
        return f"torch {version} finds no GPU: its CUDA {cuda} needs a newer NVIDIA driver"
    if sys.platform == "linux":
        return (
            f"there is an NVIDIA driver, but torch {version} is a CPU-only build: "
            f"pip install --force-reinstall torch=={release}"
        )
    return (
        f"there is an NVIDIA driver, but torch {version} is a CPU-only build: "
        f"install torch {release} with the line that pytorch.org/get-started/locally gives"
    )
