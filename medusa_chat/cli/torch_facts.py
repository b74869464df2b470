"""What torch says of this machine's processor and devices, for `medusa-chat doctor`."""

from typing import Any

import torch

from medusa_chat.checkpoints.devices import cuda_remedy, has_fast_bf16
from medusa_chat.checkpoints.gpus import has_nvidia_driver


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
    problems += cuda_remedy()
    return {
        "torch is built for": torch.version.cuda or getattr(torch.version, "hip", None) or "cpu",
        "nvidia driver": has_nvidia_driver(),
        "cuda": names,
        "mps": torch.backends.mps.is_available(),
    }
