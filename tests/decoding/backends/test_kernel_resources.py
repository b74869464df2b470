"""The Triton kernels compiled for GPUs that are not here: each fits into their shared memory."""

import json
import subprocess
import sys
from pathlib import Path

from support.triton_folder import triton_or_skip

from medusa_chat.decoding.backends import fused_kernels

# bytes of shared memory of a block, at most (CUDA programming guide, technical specifications)
LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
PROGRAM = Path(__file__).parents[2] / "support" / "triton_compiles.py"


def test_each_kernel_fits_into_the_shared_memory_of_every_card(tmp_path):
    """Before, heads of 256 numbers in 16 bits and all in fp32 did not on RTX 30 to 50 cards."""
    environment = triton_or_skip() | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, str(PROGRAM)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert {card for _, _, card, _ in found} == set(LIMITS)
    assert {kernel for kernel, *_ in found} == {"split", "merge", *fused_kernels.NAMES}
    too_large = [line for line in found if not 0 <= line[3] <= LIMITS[line[2]]]
    assert not too_large
