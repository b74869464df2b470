"""NativeTrial: products of the C library beside exact ones, once it is compiled.

Instructions that were written by hand in C may be wrong on a CPU that nobody here has: they then
give other numbers, or end the process. So the trial runs in a process of its own. No torch.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from ctypes import CDLL, POINTER, byref, c_char_p, c_int64, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medusa_chat.checkpoints.process_limits import environment
from medusa_chat.decoding.backends.native_library import Product, Weights
from medusa_chat.errors import first_line

SECONDS = 300  # on a busy machine; half a second is usual
VECTORS, TILES, PACKED = range(3)  # as `instructions` in kernels/product.c counts them
FLOATS, HALVES, UPPERS, STORED = 0, 1, 2, 16  # kernels/weights.h
PORTABLE = b"portable C"
FEW = 9  # rows of x: as many at once as there are kinds of sweeps, and one more
MANY = 35  # rows of tiles: more than one time of both
OUTS = 83  # no whole panels
DEEP, ODD = 512, 246  # inputs: whole tiles and blocks, and neither
LIMIT = 1e-5  # of the difference from the exact product, as a share of the largest output

Numbers = NDArray[Any]


def wrong_instructions(file: Path) -> list[str]:
    """The instructions of the library in a file that give wrong products or end the process, in the
    order of their trial; an empty list where all are right. Raises OSError and SubprocessError
    where that cannot be tried."""
    child = subprocess.run(
        [sys.executable, "-P", "-m", __name__, str(file)],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=SECONDS,
    )
    lines = [json.loads(line) for line in child.stdout.splitlines() if line.endswith("}")]
    if not lines:
        raise OSError(f"the C library cannot be tried: {first_line(child.stderr)}")
    wrong = [one["wrong"] for one in lines if "wrong" in one]
    if child.returncode and "trying" in lines[-1]:
        wrong.append(lines[-1]["trying"])
    return list(dict.fromkeys(wrong))


def try_library(file: str) -> Iterator[dict[str, str]]:
    """What is tried, before it is, and what was wrong."""
    c = CDLL(file)
    c.instructions.argtypes, c.instructions.restype = [c_int64], c_char_p
    c.packed_size.argtypes, c.packed_size.restype = [c_int64] * 3, c_int64
    c.pack.argtypes = [c_int64, c_void_p, c_void_p, *[c_int64] * 4]
    c.pack.restype = c.linear.restype = None
    c.linear.argtypes = [POINTER(Product), c_int64]
    vectors = c.instructions(VECTORS)
    for part, off_by in ((VECTORS, _by_vectors), (TILES, _by_tiles), (PACKED, _by_blocks)):
        own = c.instructions(part)
        name = (vectors if own == PORTABLE else own).decode()  # which read what it multiplies
        yield {"trying": name}
        if not max(off_by(c)) < LIMIT:
            yield {"wrong": name}
    yield {"done": file}


def _by_vectors(c: CDLL) -> Iterator[float]:
    for kind, ins in ((FLOATS, DEEP), (FLOATS, ODD + 1), (HALVES, ODD), (UPPERS, ODD)):
        for rows in range(1, FEW + 1):
            yield _off_by(c, kind, *_numbers(rows, ins))


def _by_tiles(c: CDLL) -> Iterator[float]:
    for rows in (1, 16, 17, MANY):
        yield _off_by(c, HALVES, *_numbers(rows, DEEP))


def _by_blocks(c: CDLL) -> Iterator[float]:
    import gguf  # a third of a second

    for kind, (each, size) in gguf.GGML_QUANT_SIZES.items():
        if not c.packed_size(STORED + kind, OUTS, DEEP):
            continue
        random = np.random.default_rng(int(kind))
        rows = random.integers(0, 256, (OUTS, DEEP // each * size), dtype=np.uint8)
        _calm(rows.reshape(-1, size), kind.name, random)
        weight = gguf.dequantize(rows, kind).astype(np.float64)
        panels = np.zeros(c.packed_size(STORED + kind, OUTS, DEEP), np.uint8)
        c.pack(STORED + kind, rows.ctypes.data, panels.ctypes.data, 0, OUTS, DEEP, 1)
        for count in (1, 2, 4, 15):
            x = _whole_numbers(count, random)
            yield _differs(c, STORED + kind, panels, x, weight)


def _calm(blocks: Numbers, name: str, random: np.random.Generator) -> None:
    """Let the scales and floors of random blocks [n, bytes] be ordinary numbers. They lie at the
    end of Q2_K, Q3_K and Q6_K, and at the start of all others; of MXFP4 they are powers of two."""
    if name == "MXFP4":
        blocks[:, 0] = random.integers(110, 130, len(blocks))
        return
    both = name in ("Q4_1", "Q5_1", "Q2_K", "Q4_K", "Q5_K")
    size = 4 if both else 2
    at = blocks.shape[1] - size if name in ("Q2_K", "Q3_K", "Q6_K") else 0
    halves = random.normal(0, 0.02, (len(blocks), size // 2)).astype(np.float16)
    blocks[:, at : at + size] = halves.view(np.uint8)


def _whole_numbers(rows: int, random: np.random.Generator) -> Numbers:
    """Inputs float32 [rows, DEEP] that 8 bits with a scale for each 32 hold exactly."""
    numbers = random.integers(-127, 128, (rows, DEEP // 32, 32)).astype(np.float32)
    numbers[..., 0] = 127
    scales = 2.0 ** random.integers(-4, 3, (rows, DEEP // 32, 1))
    return (numbers * scales).reshape(rows, DEEP).astype(np.float32)


def _numbers(rows: int, ins: int) -> tuple[Numbers, Numbers]:
    """x float32 [rows, ins] and a weight [OUTS, ins] of numbers that bf16 holds exactly."""
    random = np.random.default_rng(rows)
    x, weight = random.normal(0, 1, (rows, ins)), random.normal(0, 1, (OUTS, ins))
    return _cut(x), _cut(weight)


def _cut(numbers: Numbers) -> Numbers:
    """float32, its lower halves 0."""
    return (numbers.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def _off_by(c: CDLL, kind: int, x: Numbers, weight: Numbers) -> float:
    """See _differs; the weight is packed here: kernels/weights.h."""
    width, (outs, ins) = c.panel(), weight.shape
    padded = np.zeros((-(-outs // width) * width, ins + ins % 2 * (kind != FLOATS)), np.float32)
    padded[:outs, :ins] = weight
    if kind == FLOATS:
        words = padded.view(np.uint32)
    else:  # two of bf16 a word, the first one below
        upper = padded.view(np.uint32) >> 16
        words = upper[:, ::2] | upper[:, 1::2] << 16
    panels = words.reshape(-1, width, words.shape[1]).transpose(0, 2, 1)
    return _differs(c, kind, np.ascontiguousarray(panels), x, weight.astype(np.float64))


def _differs(c: CDLL, kind: int, panels: Numbers, x: Numbers, weight: Numbers) -> float:
    """The largest difference of the library's product from the exact one, as a share of its largest
    number; infinity where one is none."""
    y = np.full((len(x), OUTS), np.nan, np.float32)
    weights = Weights(panels.ctypes.data, kind)
    job = Product(x.ctypes.data, weights, None, y.ctypes.data, len(x), x.shape[1], OUTS)
    c.linear(byref(job), 1)
    exact = x.astype(np.float64) @ weight.T
    worst = float(np.abs(y - exact).max() / np.abs(exact).max())
    return worst if worst == worst else float("inf")


if __name__ == "__main__":
    for said in try_library(sys.argv[1]):
        print(json.dumps(said), flush=True)
