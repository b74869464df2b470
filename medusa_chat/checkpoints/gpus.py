"""GPUs: their arithmetic and bandwidth, and the step times that follow. Plain numbers, no torch.

The constants were fitted to steps of a 7B and an 8B on an H200 (assets/benchmarks/NOTES.md, "On a
GPU"); other GPUs are modelled with the same constants.
"""

from dataclasses import dataclass
from typing import Any

SHARE = 0.93  # of the data sheet's bandwidth that large reads reach
PEAK_SHARE = 0.75  # of the data sheet's FLOP/s that products reach
LAYER_SECONDS = 44e-6  # overhead of a layer: launches, and attention, which waits for them
NODE_SECONDS = 0.18e-6  # overhead of a layer for each node of a tree
TREE_SECONDS = 0.12e-3  # overhead of a step with a tree: its draft and its acceptance
DECODED = 28.1  # weights of 4 or 8 bits per cycle and multiprocessor, with one row
# extra rows that double the decoding time: in the linear term, and in the quadratic one
MORE_ROWS, SQUARED_ROWS = 29.5, 32.7

# FLOP per cycle and multiprocessor of dense 16-bit products with 32-bit sums, by compute
# capability; where cards of one capability differ, that of the slower GeForce
CYCLE = {
    **{(7, 0): 1024, (7, 5): 512, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}


@dataclass(frozen=True)
class Gpu:
    """flops: the peak of dense 16-bit products with 32-bit sums, in FLOP/s; bandwidth: in bytes/s;
    both from the vendor's data sheet. cycles: of all multiprocessors together, per second."""

    name: str
    flops: float
    bandwidth: float
    cycles: float

    def seconds(self, flops: float, moved: float) -> float:
        """The time of an operator by the roofline, at the shares above. moved: bytes."""
        return max(flops / (PEAK_SHARE * self.flops), moved / (SHARE * self.bandwidth))

    def decoding_seconds(self, weights: float, rows: int) -> float:
        """The decoding time of our kernel for `rows` rows and weights of 4 or 8 bits."""
        more = rows - 1
        rows_cost = 1 + more / MORE_ROWS + (more / SQUARED_ROWS) ** 2
        return weights / (DECODED * self.cycles) * rows_cost


def beside_seconds(layers: int, nodes: int) -> float:
    """The time of a step of `nodes` nodes, root included, besides reading and arithmetic."""
    seconds = layers * LAYER_SECONDS
    return seconds if nodes == 1 else seconds + layers * nodes * NODE_SECONDS + TREE_SECONDS


GPUS = tuple(
    Gpu(name, tera * 1e12, giga * 1e9, tera * 1e12 / cycle)
    for name, tera, giga, cycle in (
        ("RTX 3090", 71, 936, 512),
        ("RTX 4090", 165, 1008, 512),
        ("RTX 5090", 210, 1792, 512),
        ("A40", 150, 696, 1024),
        ("A6000", 155, 768, 1024),
        ("A100-80GB-PCIe", 312, 1935, 2048),
        ("H100", 989, 3350, 4096),
        ("H200", 989, 4800, 4096),
    )
)


def gpu_of(properties: Any) -> Gpu | None:
    """The GPU with these properties (torch.cuda.get_device_properties): from the table by its name,
    otherwise from its clocks, multiprocessors and memory; None where those are not reported."""
    words = f" {properties.name.replace('-', ' ')} "
    for gpu in GPUS:
        if f" {gpu.name.partition('-')[0]} " in words and " Laptop " not in words:
            return gpu
    cycle = CYCLE.get((properties.major, properties.minor), 0)
    numbers = ("multi_processor_count", "clock_rate", "memory_clock_rate", "memory_bus_width")
    count, clock, memory, width = (getattr(properties, name, 0) for name in numbers)
    cycles, bandwidth = count * clock * 1e3, 2 * memory * 1e3 * width / 8  # clocks in kHz
    flops = cycle * cycles
    return Gpu(properties.name, flops, bandwidth, cycles) if flops and bandwidth else None
