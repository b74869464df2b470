"""The Triton kernels against their torch twins, in Triton's interpreter: no GPU is needed.

Triton is wanted, but not beside torch: on a machine without a GPU other libraries would then
compile with it. TRITON_FOLDER names where it lies (`pip install --target`); CI sets it.
"""

import subprocess
import sys
from pathlib import Path

import pytest
from support.triton_folder import triton_or_skip

TESTS = Path(__file__).parents[2]
NF4 = """
import torch
from medusa_chat.decoding.backends import nf4
from medusa_chat.decoding.backends.kernels.nf4 import run
for dtype, limit in ((torch.float32, 1e-5), (torch.float16, 2e-3)):
    off = nf4.difference(torch.device("cpu"), dtype)
    assert off < limit, (dtype, off)
generator = torch.Generator().manual_seed(1)
codes = torch.randint(256, (96 * 320 // 2,), generator=generator).to(torch.uint8)
tiles = nf4.repack(codes, torch.rand(96 * 320 // 64, generator=generator), 96, 320)
x = torch.randn(64, 320, generator=generator)
whole = run(tiles, x)
assert torch.equal(whole, run(tiles, x))
for rows in (1, 8, 16, 32):
    assert torch.allclose(run(tiles, x[:rows].contiguous()), whole[:rows], atol=1e-5)
"""
SPLIT = """
import torch
import support.triton_interpreter
from medusa_chat.decoding.backends import split_attention
cases = ((torch.float32, 16, 1e-5), (torch.float32, 128, 1e-5), (torch.float16, 64, 2e-3))
for dtype, width, limit in cases:
    off = split_attention.difference(torch.device("cpu"), dtype, width)
    assert off < limit, (dtype, width, off)
"""
LAYERS = """
import torch
import support.triton_interpreter
from medusa_chat.decoding.backends import layer_kernels
odd = layer_kernels.Sizes(hidden=96, heads=(6, 2), width=24, gate=1100)
plain = layer_kernels.Sizes(hidden=64, heads=(2, 2), width=16, gate=80)
for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
    for name in layer_kernels.NAMES:
        for sizes in (odd, plain):
            off = layer_kernels.difference(name, sizes, torch.device("cpu"), dtype)
            assert off < limit, (name, dtype, sizes, off)
"""


@pytest.mark.parametrize("program", [NF4, SPLIT, LAYERS], ids=["nf4", "split", "layers"])
def test_a_kernel_gives_what_its_twin_gives(program):
    """In a process of its own: Triton asks for its interpreter when it is imported. It multiplies
    no bf16 (it would multiply their bits)."""
    environment = triton_or_skip(TESTS) | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
