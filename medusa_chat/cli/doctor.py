"""`medusa-chat doctor`: this machine's hardware and software, and problems with their remedies."""

import json
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from medusa_chat import __version__, paths
from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.layouts.headers import read_header
from medusa_chat.checkpoints.layouts.source import LocalFolder
from medusa_chat.checkpoints.machine import cpu_name
from medusa_chat.cli.options import AsJson, DataDir, Device, flag, prepare_process
from medusa_chat.cli.terminal import json_line
from medusa_chat.errors import DeviceError, ModelError, first_line
from medusa_chat.units import gb

PACKAGES = (
    "torch",
    "transformers",
    "accelerate",
    "bitsandbytes",
    "gradio",
    "huggingface_hub",
    "peft",
    "pydantic",
    "safetensors",
    "tokenizers",
    "typer",
)
DEMO_FILES = (
    "config.json",
    "tokenizer.json",
    "model.safetensors",
    "medusa_lm_head.safetensors",
    "medusa_calibration.json",
)
NO_COMPILER = f"none: decoding on a CPU is slow ({native_build.REMEDY})"


TimesGpu = Annotated[bool, flag("--gpu", "Time our kernels on this GPU; loads use what is faster.")]


@dataclass
class Report:
    """Facts by section and name, and problems, each with its remedy."""

    sections: dict[str, dict[str, Any]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def lines(self) -> Iterator[str]:
        for name, facts in self.sections.items():
            yield name
            yield from (f"  {_line(fact, value)}" for fact, value in facts.items())
        yield from (f"problem: {problem}" for problem in self.problems)
        if not self.problems:
            yield "no problems found"


def _line(fact: str, value: Any) -> str:
    """A fact as text. JSON has memory in GiB; text has it in the units used everywhere else."""
    if fact.endswith("_gib"):
        return f"{fact.removesuffix('_gib').replace('_', ' ')}: {gb(value * 2**30)}"
    return f"{fact}: {_text(value)}"


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "none"
    return "unknown" if value is None else str(value)


def doctor(
    gpu: TimesGpu = False,
    device: Device = "auto",
    data_dir: DataDir = None,
    as_json: AsJson = False,
) -> None:
    """Report this machine's hardware and software, and problems with remedies."""
    prepare_process(device, data_dir)
    if gpu:
        return time_gpu(device, as_json)
    report = examine()
    print(json_line(report.to_json(), indent=2) if as_json else "\n".join(report.lines()))
    if device.startswith("cuda") and not has_cuda(report):
        raise DeviceError(
            "torch finds no CUDA device: check the NVIDIA driver, or use --device cpu"
        )


def time_gpu(name: str, as_json: bool) -> None:
    """Time our kernels on a CUDA card, print a table, and let loads use those that are faster.
    Raises DeviceError without one."""
    import torch  # takes seconds

    if not torch.cuda.is_available():
        raise DeviceError("--gpu times kernels on a CUDA GPU, and torch finds none here")
    from medusa_chat.checkpoints.devices import choose_device
    from medusa_chat.checkpoints.kernel_times import time_kernels
    from medusa_chat.checkpoints.kernel_trial import keep_choice

    device = choose_device("cuda" if name == "auto" else name)
    times = []
    for time in time_kernels(device):
        times.append(time)
        if not as_json:
            print("\n".join(_lines_of(time)), flush=True)
    chosen = [time.name for time in times if time.is_chosen]
    file = keep_choice(device, frozenset(chosen))
    if as_json:
        print(json_line({"kernels": [asdict(t) for t in times], "chosen": chosen}, indent=2))
    else:
        print(f"loads on this card use {', '.join(chosen) or 'no kernel of ours'} (see {file})")


def _lines_of(time: Any) -> Iterator[str]:
    """The rows of a KernelTime: microseconds of torch's operators and of our kernel."""
    if time.failure:
        yield f"{time.name:<24} not timed: {time.failure}"
    for what, plain, own in time.cases:
        figures = f"torch {1e6 * plain:8.1f} us  ours {1e6 * own:8.1f} us  {plain / own:5.2f}x"
        yield f"{time.name:<24} {what:<10} {figures}  {'used' if time.is_chosen else 'not used'}"


def examine() -> Report:
    """Examine the machine; changes and sends nothing."""
    report = Report()
    report.sections["program"] = _program()
    report.sections["packages"] = {name: _version(name) for name in PACKAGES}
    report.sections["memory"] = _memory()
    report.sections["folders"] = _folders()
    for folder in paths.unwritable():
        report.problems.append(
            f"cannot write to {folder}: change its permissions, or give --data-dir"
        )
    report.sections["demo checkpoint"] = _demo(report.problems)
    report.sections["cpu"] = {
        "model": cpu_name(),
        "cores": os.cpu_count(),
        "C compiler": " ".join(native_build.compiler() or [NO_COMPILER]),
    }
    missing = [name for name, version in report.sections["packages"].items() if version is None]
    if missing:
        report.problems.append(f"not installed: pip install {' '.join(missing)}")
    if "torch" not in missing:
        try:
            report.sections["cpu"] |= processor()
        except (ImportError, OSError) as error:
            report.problems.append(f"torch is broken ({first_line(error)}): reinstall it")
            return report
        report.sections["devices"] = devices(report.problems)
        report.sections["devices"]["step backend"] = _backend(has_cuda(report))
    return report


def _backend(is_cuda: bool) -> str:
    """What runs decoding steps on this machine's first device."""
    if is_cuda:
        return "CUDA graphs if the check at the load passes, else torch operators"
    if native_build.compiler() is None:
        return "torch operators"
    return "the native backend (C) for Llama-like models in fp32 and bf16, else torch operators"


def processor() -> dict[str, Any]:
    """What torch reports of the processor. Imports torch."""
    import torch

    from medusa_chat.checkpoints.devices import has_fast_bf16

    return {
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "mkldnn": torch.backends.mkldnn.is_available(),
        "fast bf16": has_fast_bf16(),
        "fast fp16": _torch_check("_is_mkldnn_fp16_supported"),
        "amx": _torch_check("_is_amx_tile_supported"),
    }


def _torch_check(name: str) -> bool | None:
    """One of torch's private checks; None if this build does not have it."""
    import torch

    module = torch.cpu if name.startswith("_is_amx") else torch.ops.mkldnn
    try:
        return bool(getattr(module, name)())
    except (AttributeError, RuntimeError):
        return None


def devices(problems: list[str]) -> dict[str, Any]:
    """The devices that torch can use. A remedy for an unusable GPU is added to `problems`."""
    import torch

    from medusa_chat.checkpoints.devices import cuda_remedy
    from medusa_chat.checkpoints.machine import has_nvidia_driver

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    problems += cuda_remedy()
    return {
        "torch is built for": torch.version.cuda or getattr(torch.version, "hip", None) or "cpu",
        "nvidia driver": has_nvidia_driver(),
        "cuda": names,
        "mps": torch.backends.mps.is_available(),
    }


def has_cuda(report: Report) -> bool:
    """Whether torch can use a CUDA device."""
    return bool(report.sections.get("devices", {}).get("cuda"))


def _program() -> dict[str, Any]:
    return {
        "medusa-chat": __version__,
        "python": platform.python_version(),
        "interpreter": sys.executable,
        "platform": platform.platform(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, Any]:
    """GiB with one decimal. psutil is a dependency of accelerate."""
    facts: dict[str, Any] = {"disk_free_gib": _gib(shutil.disk_usage(paths.PACKAGE).free)}
    try:
        import psutil
    except ImportError:
        return facts
    memory = psutil.virtual_memory()
    return facts | {"free_gib": _gib(memory.available), "total_gib": _gib(memory.total)}


def _gib(count: int) -> float:
    return round(count / 2**30, 1)


def _folders() -> dict[str, Any]:
    """The folders, and what determines each."""
    is_set = bool(os.environ.get(paths.DATA_DIR_VARIABLE))
    origin = "--data-dir" if is_set else "platform default"
    is_installed = paths.asset().is_relative_to(paths.PACKAGE)
    place = "inside the installed package" if is_installed else "beside the package"
    shipped = {"assets": paths.asset(), "presets": paths.preset()}
    own = {"data": paths.data_dir, "state": paths.state_dir, "cache": paths.cache_dir}
    return {name: f"{folder} ({place})" for name, folder in shipped.items()} | {
        name: f"{folder()} ({origin})" for name, folder in own.items()
    }


def _demo(problems: list[str]) -> dict[str, Any]:
    folder = paths.asset("demo")
    broken = [name for name in DEMO_FILES if not is_whole(folder / name)]
    if broken:
        problems.append(
            f"the demo checkpoint is incomplete ({', '.join(broken)}): reinstall medusa-chat, or "
            "build it with assets/demo/build.py"
        )
    return {"folder": str(folder), "whole": not broken, "missing or broken": broken}


def is_whole(file: Path) -> bool:
    """Whether a file is complete: JSON parses, and safetensors has the length its header says."""
    try:
        if file.suffix == ".safetensors":
            read_header(LocalFolder(file.parent), file.name)
        else:
            json.loads(file.read_bytes())
        return True
    except (OSError, ValueError, RecursionError, ModelError):
        return False
