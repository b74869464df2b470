"""A program that compiles the Triton kernels, as `run` launches them, for GPUs that are not here.

It prints a JSON line for each: [kernel, launch, architecture, bytes of shared memory].
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

# Shared memory is laid out before LLVM's code is made, which need not be fast here.
os.environ["DISABLE_LLVM_OPT"] = "1"

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from medusa_chat.decoding.backends import fused_kernels
from medusa_chat.decoding.backends.kernels import fused, split

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
CPU = torch.device("cpu")
HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
SPLIT = [
    *((HALF, width, cc) for width in (64, 128, 256) for cc in (86, 90)),
    *((FULL, width, 86) for width in (64, 128, 256)),
    *((BRAIN, 128, cc) for cc in (80, 89, 120)),
]
LAYERS = [(HALF, 86), (FULL, 90), *((BRAIN, cc) for cc in (80, 89, 120))]
SIZES = fused_kernels.Sizes(5000, hidden=8192, heads=(64, 8), width=128, gate=28672)
# Of the widths one is compiled to machine code in each number format and for each card.
WHOLE = {(HALF, 128), (FULL, 64), (BRAIN, 128)}


class Launches:
    """Stands for a kernel: keeps the arguments and options of its last launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel, self.names = kernel, kernel.arg_names

    def __getitem__(self, grid: Any) -> Any:
        return self._keep

    def _keep(self, *arguments: Any, **named: Any) -> None:
        self.values = dict(zip(self.names, arguments, strict=False)) | named

    def shared(self, architecture: int) -> int:
        """Bytes of shared memory of the last launch on a GPU of compute capability 8.6 for 86."""
        given = {name: self.values[name] for name in self.names}
        constants = {p.name for p in self.kernel.params if p.is_constexpr}
        constants |= {p.name for p in self.kernel.params if _is_constant(p, given[p.name])}
        signature = {n: "constexpr" if n in constants else _type(v) for n, v in given.items()}
        source = ASTSource(
            fn=self.kernel,
            signature=signature,
            constexprs={name: given[name] for name in constants},
            attrs={
                (place,): [["tt.divisibility", 16]]
                for place, (name, value) in enumerate(given.items())
                if name not in constants and _is_round(value)
            },
        )
        options = {name: v for name, v in self.values.items() if name not in given}
        made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
        return int(made.metadata.shared)


@contextmanager
def without_machine_code() -> Iterator[None]:
    """While the block runs Triton ends where shared memory is laid out, before PTX."""

    def shorten(backend: Any = None, stages: Any = None, *rest: Any) -> tuple[str, str]:
        if stages is not None:  # Triton 3.7 also asks what it is to be called in the cache
            stages["ptx"] = lambda source, metadata: metadata.update(name="") or ""
            stages["cubin"] = lambda source, metadata: b""
        return "shortened", "shortened"

    knobs.runtime.add_stages_inspection_hook = shorten
    try:
        yield
    finally:
        knobs.runtime.add_stages_inspection_hook = None


def kept(module: Any, name: str) -> Launches:
    """A module's kernel, replaced there by what keeps its launches."""
    launches = Launches(getattr(module, f"_{name}_kernel"))
    setattr(module, f"_{name}_kernel", launches)
    return launches


def _type(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"*{NAMES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def _is_constant(parameter: Any, value: Any) -> bool:
    """Whether Triton compiles this argument of a launch as a constant, as it does a count of 1."""
    is_one = type(value) is int and value == 1 and not parameter.do_not_specialize
    return value is None or is_one


def _is_round(value: Any) -> bool:
    """Whether Triton takes it for divisible by 16, as it does at a launch."""
    return isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)


def compiled() -> Iterator[list[Any]]:
    """What is printed, line by line."""
    launches, merges = kept(split, "split"), kept(split, "merge")
    for dtype, width, architecture in SPLIT:
        query, key = (torch.zeros(1, *sizes, width, dtype=dtype) for sizes in ((8, 16), (2, 512)))
        split.run(query, key, key, torch.zeros(16, 3, dtype=torch.int64), 0.1)
        launch = f"{NAMES[dtype]}, width {width}"
        with nullcontext() if (dtype, width) in WHOLE else without_machine_code():
            shared = launches.shared(architecture)
        yield ["split", launch, architecture, shared]
        if (dtype, width) == (HALF, 128):
            yield ["merge", launch, architecture, merges.shared(architecture)]
    for dtype, groups in ((HALF, 1), (BRAIN, 4)):  # plain decoding: one row
        query, key = (torch.zeros(1, heads, 1, 128, dtype=dtype) for heads in (2 * groups, 2))
        split.run(query, key, key, torch.zeros(1, 3, dtype=torch.int64), 0.1)
        yield ["split", f"{NAMES[dtype]}, {groups} rows", 90, launches.shared(90)]
        yield ["merge", f"{NAMES[dtype]}, {groups} rows", 90, merges.shared(90)]
    for name in fused_kernels.IN_LAYERS:
        launches = kept(fused, name)
        for is_fixed in (True, False) if name == "turned" else (True,):
            for dtype, architecture in LAYERS:
                for count in (16, 1) if dtype == HALF else (16,):
                    given = name, SIZES, count, CPU, dtype, dtype, is_fixed
                    fused_kernels.kernel(name)(*fused_kernels.arguments(*given))
                    yield [name, NAMES[dtype], architecture, launches.shared(architecture)]
    for name in fused_kernels.ON_LOGITS:
        launches = kept(fused, name)
        fused_kernels.kernel(name)(*fused_kernels.arguments(name, SIZES, 16, CPU, FULL, FULL))
        for architecture in (86, 90):
            yield [name, "fp32", architecture, launches.shared(architecture)]


if __name__ == "__main__":
    for line in compiled():
        print(json.dumps(line), flush=True)
