"""The parts of gpu.py about the machine: what it is, and how fast it reads."""

import platform
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from gpu_clock import timed
from gpu_part import Bench
from torch.nn import functional as F

PACKAGES = ("torch", "transformers", "triton", "bitsandbytes")
ASKED = "driver_version,power.limit,clocks.max.sm,clocks.max.mem"
WIDTH = 4096


def machine(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Device, driver and versions. Ends the process where there is no CUDA device."""
    if bench.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device here")
    yield "python", platform.python_version()
    for name in PACKAGES:
        yield name, _version(name)
    yield "torch is built for CUDA", torch.version.cuda
    if bench.device != "cuda":
        yield "device", platform.processor() or platform.machine()
        return
    facts = torch.cuda.get_device_properties(0)
    yield "device", facts.name
    yield "capability", f"{facts.major}.{facts.minor}"
    yield "multiprocessors", facts.multi_processor_count
    yield "GB", facts.total_memory / 1e9
    yield "driver, watts, highest clocks", _asked_driver()


def _version(name: str) -> str | None:
    try:
        return torch.__version__ if name == "torch" else version(name)
    except PackageNotFoundError:
        return None


def _asked_driver() -> str:
    command = ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"


def ceiling(bench: Bench) -> Iterator[tuple[str, Any]]:
    """GB/s of reading more than any cache holds, in three ways; the fastest counts."""
    device = bench.device
    rows = bench.either(2**20, 2**10)
    if device == "cuda":
        rows = min(rows, torch.cuda.mem_get_info()[0] // (8 * WIDTH))
    weights = torch.ones(rows, WIDTH, dtype=torch.float16, device=device)
    row, other = weights[:1].clone(), torch.empty_like(weights)
    ways = {
        "product of one row": (lambda: F.linear(row, weights), 1),
        "largest": (lambda: weights.view(torch.int32).amax(), 1),
        "copy, read and written": (lambda: other.copy_(weights), 2),
    }
    rates = []
    for name, (call, passes) in ways.items():
        rates.append(passes * weights.nbytes / 1e6 / timed(device, call, bench.either(20, 3)))
        yield f"{name}, GB/s", rates[-1]
    yield "GB/s", max(rates)
