"""The Triton kernels against their torch twins, in Triton's interpreter: no GPU is needed.

Triton is wanted, but not beside torch: on a machine without a GPU other libraries would then
compile with it. TRITON_FOLDER names where it lies (`pip install --target`); CI sets it.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.triton_folder import triton_or_skip

TESTS = Path(__file__).parents[2]
SPLIT = """
import torch
from medusa_chat.decoding.backends import split_attention
for dtype, width, limit in ((torch.float32, 128, 1e-5), (torch.float16, 64, 2e-3)):
    off = split_attention.difference(torch.device("cpu"), dtype, width)
    assert off < limit, (dtype, width, off)
"""
LAYERS = """
import torch
from medusa_chat.decoding.backends import fused_kernels
odd = fused_kernels.Sizes(0, hidden=96, heads=(6, 2), width=24, gate=1100)
plain = fused_kernels.Sizes(0, hidden=64, heads=(2, 2), width=16, gate=80)
part = fused_kernels.Sizes(0, hidden=96, heads=(6, 2), width=24, gate=80, rotary=18)
for dtype, limit in ((torch.float32, 1e-6), (torch.float16, 2e-3)):
    for name in fused_kernels.IN_LAYERS:
        for sizes in (odd, plain, part):
            off = fused_kernels.difference(name, sizes, torch.device("cpu"), dtype)
            assert off < limit, (name, dtype, sizes, off)
"""
ROWS = """
import torch
from medusa_chat.decoding.backends import fused_kernels
from medusa_chat.decoding.acceptance import TORCH
from medusa_chat.decoding.acceptance import filtered
from medusa_chat.decoding.settings import GenerationSettings
device = torch.device("cpu"), torch.float32
for size in (3, 4096, 5003):
    off = fused_kernels.difference("draw", fused_kernels.Sizes(size), *device)
    assert off == 0, (size, off)
draw, depths = fused_kernels.kernel("draw"), torch.tensor([0, 1, 1])
level = torch.zeros(3, 5003)  # the noise alone decides
for place, seed in ((0, 1), (7, 0), (2**33, 2**63 - 1), (40, 2**32 + 5)):
    for one in (torch.tensor(seed), seed):
        assert draw(level, depths, 1, place, one).equal(TORCH.draw(level, depths, 1, place, one))
cut = filtered(torch.randn(3, 5003), GenerationSettings(min_p=0.3))
assert draw(cut, depths, 1, 7, 5).equal(TORCH.draw(cut, depths, 1, 7, 5))
bad = torch.full((2, 5003), torch.nan)
assert int(draw(bad, depths[:2], 1, 0, 0).max()) < 5003
"""


PROGRAMS = {"split": SPLIT, "layers": LAYERS, "rows": ROWS}
# All of them in one process, which imports torch and Triton once: what went wrong in each.
EACH = f"""
import json, traceback
import support.triton_interpreter
wrong = {{}}
for name, program in {PROGRAMS!r}.items():
    try:
        exec(program, {{}})
    except Exception:
        wrong[name] = traceback.format_exc()
print(json.dumps(wrong))
"""


@pytest.fixture(scope="module")
def wrong() -> dict[str, str]:
    """In a process of its own: Triton asks for its interpreter when it is imported. It multiplies
    no bf16 (it would multiply their bits)."""
    environment = triton_or_skip(TESTS) | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", EACH]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_kernel_gives_what_its_twin_gives(wrong, name):
    assert name not in wrong, wrong[name]
