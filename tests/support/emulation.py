"""Our CUDA C++ on a CPU, thread by thread: compiled with tests/support/emulated_cuda.c."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest

EMULATED = Path(__file__).with_name("emulated_cuda.c")
# bytes of shared memory of a block, at most (CUDA programming guide, technical specifications)
LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}


def emulator(folder: Path):
    """(source, what it is compiled with) -> its `launch`. Skips without a C compiler, but never in
    CI."""
    compiler = shutil.which("cc")
    if compiler is None:
        assert "CI" not in os.environ, "CI has to have a C compiler"
        pytest.skip("needs a C compiler")

    @cache
    def library(source: Path, asked: tuple[tuple[str, int], ...]):
        flags = [f"-D{name}={value}" for name, value in asked]
        file = folder / f"{source.stem}-{'-'.join(str(value) for _, value in asked)}.so"
        command = [compiler, "-O1", "-shared", "-fPIC", "-w", *flags]
        command += [f'-DSOURCE="{source}"', "-o", str(file), str(EMULATED)]
        subprocess.run(command, check=True)
        return ctypes.CDLL(str(file)).launch

    def launcher(source: Path, asked: Mapping[str, int]):
        return library(source, tuple(asked.items()))

    return launcher


def places(*tensors):
    """The addresses of tensors, as `launch` takes them; none for None."""
    return [ctypes.c_void_p(None if one is None else one.data_ptr()) for one in tensors]
