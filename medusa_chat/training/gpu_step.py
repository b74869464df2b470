"""What a decoding step of a model of named size costs on a named GPU. Plain numbers, no torch.

Appendix G (`hardware.py`) has one layer's products in 16 bits. A step has more: the output
projection, the LM head, the Medusa heads, what lies between the reads, and in 4 bit the decoding.
Modelled after the steps of an H200 (`checkpoints/gpus.py`); on other GPUs nothing was measured.

4 bit is NF4 with double quantisation; LM head and Medusa heads keep 16 bits. Its products are our
kernel's, or, where that is faster and beyond its rows, bitsandbytes': the weights are written out
in 16 bits and read again in every step.
"""

from typing import Literal

from medusa_chat.checkpoints.gpus import beside_seconds
from medusa_chat.checkpoints.memory_needs import LINEAR
from medusa_chat.training.hardware import BYTES, Gpu, ModelShape, attention, linear

Precision = Literal["fp16", "4 bit"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "4 bit")

HEADS = 5  # Medusa heads with LM heads of their own, as published; they run on one row
MOST_ROWS = 64  # of our 4-bit product


def step_seconds(
    shape: ModelShape, gpu: Gpu, precision: Precision, nodes: int, length: int
) -> float:
    """Seconds of a step of `nodes` draft nodes, root included, behind `length` tokens; 1 is plain
    decoding, which runs no Medusa heads."""
    hidden, inner, words = shape.hidden, shape.inner, shape.vocabulary
    linears = ((hidden, 3 * hidden), (hidden, hidden), (hidden, 2 * inner), (inner, hidden))
    product = _dense if precision == "fp16" else _packed
    seen = attention(hidden // shape.head_dim, nodes, length + nodes, shape.head_dim)
    layer = sum(product(gpu, nodes, *sizes) for sizes in linears)
    layer += 2 * gpu.seconds(seen.flops, BYTES * seen.values)
    heads = HEADS if nodes > 1 else 0
    head = _dense(gpu, 1, hidden, hidden) + _dense(gpu, 1, hidden, words)
    outputs = _dense(gpu, nodes, hidden, words) + heads * head
    return shape.layers * layer + outputs + beside_seconds(shape.layers, nodes)


def _dense(gpu: Gpu, rows: int, inputs: int, outputs: int) -> float:
    work = linear(rows, inputs, outputs)
    return gpu.seconds(work.flops, BYTES * work.values)


def _packed(gpu: Gpu, rows: int, inputs: int, outputs: int) -> float:
    weights = inputs * outputs
    unpacked = gpu.seconds(0.0, (LINEAR["nf4"] + BYTES) * weights)
    unpacked += _dense(gpu, rows, inputs, outputs)
    if rows > MOST_ROWS:
        return unpacked
    work = linear(rows, inputs, outputs)
    read = gpu.seconds(work.flops, BYTES * (work.values - weights) + LINEAR["nf4"] * weights)
    return min(max(read, gpu.decoding_seconds(weights, rows)), unpacked)
