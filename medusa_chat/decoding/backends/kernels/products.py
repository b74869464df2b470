"""Products of a few rows with quantised weights.

The kernel, products.cu, is compiled for the device at hand by NVRTC, which torch brings along."""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.kernels import processors

# the 16 values of a 4-bit NormalFloat (QLoRA, arXiv 2305.14314, appendix E)
TABLE = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SOURCE = Path(__file__).with_name("products.cu")
LEAST_CAPABILITY = 8, 0  # of a device with the copies that products.cu makes
LEAST_SHARED = 101_376  # bytes that a block may have on any of them
THREADS = 256
EIGHTS = 1, 2, 4, 8  # of 8 rows, for which there is a program each
RESIDENT = {1: 3, 2: 2}  # blocks a multiprocessor by these, where they fit; else one
TABLES = 2**15  # bytes of shared memory of the pairs of 4 bits


def geometry(eights: int, bits: int, most_shared: int) -> tuple[dict[str, int], int]:
    """What products.cu is compiled with for 8 `eights` rows, and the bytes of shared memory that a
    launch asks for besides what the program has. most_shared: bytes that a block may have."""
    tiles = 2 if eights > 2 and _shared(2, bits)[0] <= most_shared else 1
    asked = {"BITS": bits, "EIGHTS": eights, "TILES": tiles, "RESIDENT": RESIDENT.get(eights, 1)}
    return asked, _shared(tiles, bits)[1]


def _shared(tiles: int, bits: int) -> tuple[int, int]:
    """Bytes of shared memory of a block: all, and those of the chunks that its eight warps copy."""
    ring = 8 * 2 * 16 * tiles * (128 + (16 if bits == 4 else 0))
    return ring + 7 * 16 * tiles * 8 * 4 + (TABLES if bits == 4 else 0) + 1024, ring


def compiled(asked: dict[str, int], is_bf16: bool, architecture: int) -> bytes:
    """products.cu in machine code. architecture: 86 for compute capability 8.6. Raises RuntimeError
    with what the compiler said, ImportError without one."""
    from cuda.bindings import nvrtc

    program = _checked(nvrtc.nvrtcCreateProgram(SOURCE.read_bytes(), b"products.cu", 0, [], []))
    defined = [f"-D{name}={value}" for name, value in asked.items()]
    given = [f"--gpu-architecture=sm_{architecture}", "-std=c++17", "-w", *defined]
    options = [option.encode() for option in (*given, f"-DIS_BF16={int(is_bf16)}")]
    (outcome,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(outcome):
        said = b" " * _checked(nvrtc.nvrtcGetProgramLogSize(program))
        nvrtc.nvrtcGetProgramLog(program, said)
        raise RuntimeError(said.decode(errors="replace").strip("\0 \n"))
    code: bytes = b" " * _checked(nvrtc.nvrtcGetCUBINSize(program))
    _checked(nvrtc.nvrtcGetCUBIN(program, code))
    nvrtc.nvrtcDestroyProgram(program)
    return code


def run(codes: Tensor, scales: Tensor, x: Tensor, bits: int) -> Tensor:
    """x [m, K] contiguous, in fp16 or bf16, 1 to 64 rows, times the weights [N, K] -> [m, N] in
    that dtype. bits: 4 for NF4, codes uint8 [N * K / 2], the first of a pair in the high half, and
    scales fp32 [N * K / 64]; 8 for codes int8 [N, K], and scales fp32 [N], of which a 127th counts.

    The same numbers give the same result at every call, whatever the number of rows."""
    from cuda.bindings import driver

    rows, inputs = x.shape
    outputs = codes.numel() * 8 // (bits * inputs)
    eights = next(count for count in EIGHTS if rows <= 8 * count)
    function, tiles, shared = _function(x.device, x.dtype, eights, bits)
    blocks = processors(x.device) * RESIDENT.get(eights, 1)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    tensors = codes, scales, x, _table(x.device, x.dtype), out
    values = (*(tensor.data_ptr() for tensor in tensors), rows, outputs, inputs // 64)
    types = (*(ctypes.c_void_p,) * len(tensors), *(ctypes.c_int,) * 3)
    grid = min(-(-outputs // (16 * tiles)), blocks)
    stream = torch.cuda.current_stream(x.device).cuda_stream
    _checked(
        driver.cuLaunchKernel(
            *(function, grid, 1, 1, THREADS, 1, 1, shared, stream), (values, types), 0
        )
    )
    return out


@cache
def _function(
    device: torch.device, dtype: torch.dtype, eights: int, bits: int
) -> tuple[Any, int, int]:
    """The program for a device, its tiles, and the shared memory that its launches ask for."""
    from cuda.bindings import driver

    capability = torch.cuda.get_device_capability(device)
    if capability < LEAST_CAPABILITY:
        raise RuntimeError("needs compute capability 8.0")
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED)
    asked, shared = geometry(eights, bits, limit)
    code = compiled(asked, dtype == torch.bfloat16, 10 * capability[0] + capability[1])
    module = _checked(driver.cuModuleLoadData(code))
    function = _checked(driver.cuModuleGetFunction(module, b"product"))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    _checked(driver.cuFuncSetAttribute(function, most, shared))
    return function, asked["TILES"], shared


@cache
def _table(device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.tensor(TABLE, dtype=dtype, device=device)


def _checked(answer: Any) -> Any:
    """What a function of CUDA returned besides its status. Raises RuntimeError for a failure; a
    lost device is reported by torch."""
    outcome, *values = answer
    if int(outcome):
        raise RuntimeError(f"CUDA: {outcome.name}")
    return values[0] if values else None
