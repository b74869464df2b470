"""This machine's processors, as far as they are known without torch."""

import platform
import shutil
from pathlib import Path
from typing import NamedTuple

from medusa_chat.checkpoints import native_build


class Cpu(NamedTuple):
    """What a CPU's second copies of weights depend on: whether it computes bf16 in tiles, and
    whether there is a C compiler (native_build.py)."""

    has_amx: bool = False
    has_compiler: bool = False


PLAIN_CPU = Cpu()


def this_cpu() -> Cpu:
    """This machine's CPU. AMX is only known on Linux."""
    return Cpu("amx_tile" in _cpuinfo(), native_build.compiler() is not None)


def cpu_name() -> str:
    """The model name of this machine's CPU."""
    for line in _cpuinfo().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _cpuinfo() -> str:
    """The CPU's properties as Linux reports them; empty on other systems."""
    try:
        return Path("/proc/cpuinfo").read_text("utf-8", "replace")
    except OSError:
        return ""


def has_nvidia_driver() -> bool:
    """Whether there is a driver, and with it, most likely, a GPU; torch may be unable to use it."""
    return Path("/proc/driver/nvidia/version").exists() or bool(shutil.which("nvidia-smi"))
