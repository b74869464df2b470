"""CUDA programs: our CUDA C++, compiled for the current device and kept as machine code.

NVRTC compiles it, which comes with torch; the machine code is kept if a folder for it is known."""

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HEADER = Path(__file__).with_name("device.cuh")
LEAST_CAPABILITY = 8, 0  # of a device with the copies that our kernels make
LEAST_SHARED = 101_376  # bytes that a block may have on any of them
THREADS = 256
EIGHTS = 1, 2, 4, 8  # of 8 rows, for which there is a program each


class MachineCode:
    """Compiled programs on disk, in `folder`; none are kept while that is None."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    def get(self, key: str) -> bytes | None:
        """The program of this key; None where there is none that can be read."""
        if self.folder is None:
            return None
        try:
            code = (self.folder / key).read_bytes()
        except OSError:
            return None
        return code if code.startswith(b"\x7fELF") else None

    def put(self, key: str, code: bytes) -> None:
        """Keep a program; a disk that is full or read-only only costs time."""
        if self.folder is None:
            return
        partial = self.folder / f".{key}.{os.getpid()}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(code)
            partial.replace(self.folder / key)
        except OSError:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


KEPT = MachineCode()  # a load says where (checkpoints/kernel_trial.py)


def program(source: Path, asked: Mapping[str, int], architecture: int) -> bytes:
    """The machine code of a source, as it was kept or compiled now; see `compiled`."""
    from cuda.bindings import nvrtc

    facts = [*nvrtc.nvrtcVersion(), sorted(asked.items()), architecture]
    text = HEADER.read_bytes() + source.read_bytes() + repr(facts).encode()
    key = f"{source.stem}-{hashlib.sha256(text).hexdigest()[:32]}.cubin"
    code = KEPT.get(key)
    if code is None:
        code = compiled(source, asked, architecture)
        KEPT.put(key, code)
    return code


def compiled(source: Path, asked: Mapping[str, int], architecture: int) -> bytes:
    """A source in machine code. asked: what it is compiled with; architecture: 86 for compute
    capability 8.6. Raises RuntimeError with what the compiler said, ImportError without one."""
    from cuda.bindings import nvrtc

    headers = [HEADER.read_bytes()], [HEADER.name.encode()]
    name = source.name.encode()
    made = checked(nvrtc.nvrtcCreateProgram(source.read_bytes(), name, 1, *headers))
    defined = [f"-D{name}={value}" for name, value in asked.items()]
    given = [f"--gpu-architecture=sm_{architecture}", "-std=c++17", "-w", *defined]
    (outcome,) = nvrtc.nvrtcCompileProgram(made, len(given), [one.encode() for one in given])
    if int(outcome):
        said = b" " * checked(nvrtc.nvrtcGetProgramLogSize(made))
        nvrtc.nvrtcGetProgramLog(made, said)
        raise RuntimeError(said.decode(errors="replace").strip("\0 \n"))
    code: bytes = b" " * checked(nvrtc.nvrtcGetCUBINSize(made))
    checked(nvrtc.nvrtcGetCUBIN(made, code))
    nvrtc.nvrtcDestroyProgram(made)
    return code


def architecture(device: torch.device) -> int:
    """86 for compute capability 8.6."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have. Raises RuntimeError for a device on which our
    kernels do not run."""
    if torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        raise RuntimeError("needs compute capability 8.0")
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED))


def function(source: Path, asked: Mapping[str, int], shared: int, device: torch.device) -> Any:
    """The program `product` of a source on a device. shared: bytes that its launches ask for."""
    from cuda.bindings import driver

    code = program(source, asked, architecture(device))
    module = checked(driver.cuModuleLoadData(code))
    found = checked(driver.cuModuleGetFunction(module, b"product"))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuFuncSetAttribute(found, most, shared))
    return found


def launch(
    found: Any, grid: int, shared: int, tensors: Sequence[Tensor | None], *numbers: int
) -> None:
    """Call a program with the addresses of tensors on one device, then numbers, on its current
    stream."""
    from cuda.bindings import driver

    device = next(tensor.device for tensor in tensors if tensor is not None)
    places = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    types = (*(ctypes.c_void_p,) * len(places), *(ctypes.c_int,) * len(numbers))
    stream = torch.cuda.current_stream(device).cuda_stream
    how = grid, 1, 1, THREADS, 1, 1, shared, stream
    checked(driver.cuLaunchKernel(found, *how, ((*places, *numbers), types), 0))


@cache
def table_of(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """Numbers on a device, made once."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def checked(answer: Any) -> Any:
    """What a function of CUDA returned besides its status. Raises RuntimeError for a failure; a
    lost device is reported by torch."""
    outcome, *values = answer
    if int(outcome):
        raise RuntimeError(f"CUDA: {outcome.name}")
    return values[0] if values else None
