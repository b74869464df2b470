"""The hardware model of the paper (Medusa, arXiv 2401.10774, appendix G): a step's time on a GPU.

Plain numbers, no torch. Assumptions: values have 16 bits; an operator takes the longer of its
FLOPs at the peak rate and of moving its operands once at the peak bandwidth; operators do not
overlap and nothing else takes time; tokens a step grow with the logarithm of the nodes (the paper
gives no constant: see `growth`). Measured times are longer, most of all for small models.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import log

from medusa_chat.checkpoints.gpus import GPUS as GPUS
from medusa_chat.checkpoints.gpus import Gpu as Gpu

BYTES = 2  # of a value


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
        """Arithmetic intensity in FLOPs a byte, as in Tables 6 to 8."""
        return self.flops / (BYTES * self.values)

    def seconds(self, gpu: Gpu) -> float:
        """Seconds by the roofline of the GPU."""
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
    """The constant c of `tokens = 1 + c ln(nodes)`, from the tokens a step of one measured tree."""
    return (tokens - 1) / log(nodes)


def speedup(
    shape: ModelShape, gpu: Gpu, batch: int, length: int, nodes: int, constant: float
) -> float:
    """Acceleration rate over overhead of a tree of `nodes` nodes, against plain decoding. constant:
    from `growth`."""
    overhead = layer_seconds(shape, gpu, batch, length, nodes) / layer_seconds(
        shape, gpu, batch, length, 1
    )
    return (1 + constant * log(nodes)) / overhead


def best_nodes(shape: ModelShape, gpu: Gpu, batch: int, length: int, constant: float) -> int:
    """The tree size of 1 to 256 with the largest speedup."""
    sizes = range(1, 257)
    return max(sizes, key=lambda nodes: speedup(shape, gpu, batch, length, nodes, constant))
