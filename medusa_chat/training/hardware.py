"""The time of a decoding step on a named GPU, by the roofline: the paper's layer and a whole step.

Plain numbers, no torch. Two accuracies of one model, both of products and attention (`Work`):

- Appendix G of Medusa, arXiv 2401.10774 (`layer_seconds`, `speedup`): one layer, values of 16 bits;
  an operator takes the longer of its FLOPs at the data sheet's peak and of moving its operands once
  at its bandwidth; nothing overlaps and nothing else takes time; tokens per step grow with the
  logarithm of the nodes. Measured times are longer, most of all for small models.
- A whole step (`step_seconds`): also the output projection, LM head, Medusa heads, launches, and in
  4 bit the decoding of weights, at the shares of the data sheet that an H200 reaches
  (`checkpoints/gpus.py`); on other GPUs nothing was measured. 4 bit is NF4 with double
  quantisation; LM head and Medusa heads keep 16 bits. Its products are our kernel's, or, where that
  is faster and beyond its rows, bitsandbytes': the weights are written out in 16 bits and read
  again in every step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log
from typing import Literal

from medusa_chat.checkpoints.gpus import GPUS as GPUS
from medusa_chat.checkpoints.gpus import Gpu as Gpu
from medusa_chat.checkpoints.gpus import beside_seconds
from medusa_chat.checkpoints.memory_needs import LINEAR

BYTES = 2  # of a value
HEADS = 5  # Medusa heads with LM heads of their own, as published; they run on one row
MOST_ROWS = 64  # of our 4-bit product

Precision = Literal["fp16", "4 bit"]
PRECISIONS: tuple[Precision, ...] = ("fp16", "4 bit")


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family: the widths of its layers, how many, and its vocabulary."""

    name: str
    hidden: int
    inner: int
    layers: int
    head_dim: int = 128
    vocabulary: int = 32000


SHAPES = (
    ModelShape("7B", 4096, 11008, 32),
    ModelShape("13B", 5120, 13824, 40),
    ModelShape("33B", 6656, 17920, 60),
)


@dataclass(frozen=True)
class Work:
    """One operator: its FLOPs and the number of values that it moves."""

    flops: float
    values: float

    @property
    def intensity(self) -> float:
        """Arithmetic intensity in FLOPs per byte, as in Tables 6 to 8."""
        return self.flops / (BYTES * self.values)

    def seconds(self, gpu: Gpu) -> float:
        """Seconds by the roofline of the data sheet."""
        return max(self.flops / gpu.flops, BYTES * self.values / gpu.bandwidth)


def linear(rows: int, inputs: int, outputs: int) -> Work:
    """The product [rows, inputs] x [inputs, outputs]."""
    moved = rows * inputs + inputs * outputs + rows * outputs
    return Work(2.0 * rows * inputs * outputs, moved)


def attention(texts: int, queries: int, length: int, width: int) -> Work:
    """One of the two products of attention, [queries, width] x [width, length], for `texts` pairs
    of a text and a head."""
    moved = queries * length + length * width + queries * width
    return Work(2.0 * texts * queries * length * width, texts * moved)


# ---------------------------------------------------------------------------- the paper's layer


def layer(shape: ModelShape, batch: int, length: int, queries: int) -> Iterator[Work]:
    """The operators of a layer in the appendix: q, k, v; both products of attention; up, gate,
    down."""
    rows = batch * queries
    yield from (linear(rows, shape.hidden, shape.hidden),) * 3
    heads = batch * shape.hidden // shape.head_dim
    yield from (attention(heads, queries, length, shape.head_dim),) * 2
    yield from (linear(rows, shape.hidden, shape.inner),) * 3


def layer_seconds(shape: ModelShape, gpu: Gpu, batch: int, length: int, queries: int) -> float:
    """Seconds of a layer for `batch` texts of `length` tokens with `queries` new tokens each."""
    return sum(work.seconds(gpu) for work in layer(shape, batch, length, queries))


def growth(nodes: int, tokens: float) -> float:
    """The constant c of `tokens = 1 + c ln(nodes)`, from the tokens per step of one measured tree:
    the paper gives none."""
    return (tokens - 1) / log(nodes)


def overhead(shape: ModelShape, gpu: Gpu, batch: int, length: int, nodes: int) -> float:
    """The time of a step with a tree of `nodes` nodes over that of a plain step."""
    tree = layer_seconds(shape, gpu, batch, length, nodes)
    return tree / layer_seconds(shape, gpu, batch, length, 1)


def speedup(
    shape: ModelShape, gpu: Gpu, batch: int, length: int, nodes: int, constant: float
) -> float:
    """Acceleration rate over overhead of a tree of `nodes` nodes, against plain decoding. constant:
    from `growth`."""
    return (1 + constant * log(nodes)) / overhead(shape, gpu, batch, length, nodes)


def best_nodes(shape: ModelShape, gpu: Gpu, batch: int, length: int, constant: float) -> int:
    """The tree size of 1 to 256 with the largest speedup."""
    sizes = range(1, 257)
    return max(sizes, key=lambda nodes: speedup(shape, gpu, batch, length, nodes, constant))


# -------------------------------------------------------------------------------- a whole step


def step_seconds(
    shape: ModelShape, gpu: Gpu, precision: Precision, nodes: int, length: int
) -> float:
    """Seconds of a step of `nodes` draft nodes, root included, after `length` tokens; 1 is plain
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
