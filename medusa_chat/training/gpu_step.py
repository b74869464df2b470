"""What a decoding step of a model of named size costs on a named GPU. Plain numbers, no torch.

Appendix G (`hardware.py`) has one layer's products in 16 bits. A step has more: the output
projection, the LM head, the Medusa heads, small kernels between the products, and in 4 bit the
unpacking. Modelled, not measured: a GPU reaches SHARE of its data sheet's bandwidth and
PEAK_SHARE of its FLOP/s, operators do not overlap, and no time is lost between kernels.

4 bit is NF4 with double quantisation by bitsandbytes 0.50; LM head and Medusa heads keep 16 bits.
Its products read the packed weights as long as a step has few enough rows (FUSED_ROWS); beyond,
the weights are written out in 16 bits and read again in every step.
"""

from dataclasses import dataclass
from typing import Literal

from medusa_chat.checkpoints.gpus import KERNEL_SECONDS, SMALL_KERNELS
from medusa_chat.checkpoints.memory_estimate import LINEAR
from medusa_chat.training.hardware import BYTES, SHAPES, Gpu, ModelShape, attention, linear

Precision = Literal["fp16", "4 bit"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "4 bit")

HEADS = 5  # Medusa heads with LM heads of their own, as published; they run on one row

# The most rows whose products read packed weights, by (q, k, v), o, (up, gate) and down: what
# bitsandbytes' own rule says of each GPU's number of multiprocessors, for 7B, 13B and 33B. Where
# more rows read them again behind a gap, those are left out (A100, 8 to 16 rows of a 7B's down).
_AMPERE = ((128, 64, 128, 64), (128, 64, 128, 64), (128, 128, 128, 128))
_HOPPER = ((32, 7, 48, 5), (32, 5, 64, 5), (48, 16, 64, 16))
FUSED_ROWS = {
    **dict.fromkeys(("RTX 3090", "A40", "A6000"), _AMPERE),
    "RTX 4090": ((64, 8, 128, 64), (128, 8, 256, 64), (128, 128, 256, 128)),
    "RTX 5090": ((64, 8, 128, 8), (64, 8, 128, 16), (64, 8, 256, 8)),
    "A100-80GB-PCIe": ((64, 5, 128, 5), (64, 16, 128, 5), (64, 16, 128, 16)),
    **dict.fromkeys(("H100", "H200"), _HOPPER),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step by what takes them. unpacking: of 4-bit weights that are written out."""

    products: float
    attention: float
    lm_head: float
    heads: float
    kernels: float
    unpacking: float = 0.0

    @property
    def seconds(self) -> float:
        """The whole step."""
        parts = (self.products, self.attention, self.lm_head, self.heads, self.kernels)
        return sum(parts) + self.unpacking


def step_time(
    shape: ModelShape, gpu: Gpu, precision: Precision, nodes: int, length: int
) -> StepTime:
    """A step of `nodes` draft nodes, root included, behind `length` tokens; 1 is plain decoding,
    which runs no Medusa heads."""
    linears = [
        _linear(gpu, precision, nodes, inputs, outputs, most)
        for (inputs, outputs), most in zip(_linears(shape), _fused_rows(shape, gpu), strict=True)
    ]
    seen = attention(shape.hidden // shape.head_dim, nodes, length + nodes, shape.head_dim)
    hidden, words = shape.hidden, shape.vocabulary
    heads = HEADS if nodes > 1 else 0
    return StepTime(
        products=shape.layers * sum(seconds for seconds, _ in linears),
        attention=shape.layers * 2 * gpu.seconds(seen.flops, BYTES * seen.values),
        lm_head=_dense(gpu, nodes, hidden, words),
        heads=heads * (_dense(gpu, 1, hidden, hidden) + _dense(gpu, 1, hidden, words)),
        kernels=shape.layers * SMALL_KERNELS * KERNEL_SECONDS,
        unpacking=shape.layers * sum(unpacking for _, unpacking in linears),
    )


def _linears(shape: ModelShape) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of a layer's products: q, k, v in one; o; up and gate in one; down."""
    hidden, inner = shape.hidden, shape.inner
    return (hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden)


def _fused_rows(shape: ModelShape, gpu: Gpu) -> tuple[int, ...]:
    return FUSED_ROWS[gpu.name][SHAPES.index(shape)]


def _linear(
    gpu: Gpu, precision: Precision, rows: int, inputs: int, outputs: int, most: int
) -> tuple[float, float]:
    """Seconds of (the product, its unpacking). most: rows that read packed weights."""
    if precision == "fp16":
        return _dense(gpu, rows, inputs, outputs), 0.0
    work, weights = linear(rows, inputs, outputs), inputs * outputs
    if rows <= most:
        moved = BYTES * (work.values - weights) + LINEAR["nf4"] * weights
        return gpu.seconds(work.flops, moved), 0.0
    unpacking = gpu.seconds(0.0, (LINEAR["nf4"] + BYTES) * weights)
    return _dense(gpu, rows, inputs, outputs), unpacking


def _dense(gpu: Gpu, rows: int, inputs: int, outputs: int) -> float:
    work = linear(rows, inputs, outputs)
    return gpu.seconds(work.flops, BYTES * work.values)
