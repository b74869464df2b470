"""GPUs: arithmetic, bandwidth, and what a step takes by these. Plain numbers, no torch.

The constants are those of an H200, by the steps of a 7B and an 8B (assets/benchmarks/NOTES.md, "On
a GPU"); other GPUs are modelled alike.
"""

from dataclasses import dataclass
from typing import Any

SHARE = 0.93  # of the data sheet's bandwidth: what large reads reach
PEAK_SHARE = 0.75  # of the FLOP/s
LAYER_SECONDS = 44e-6  # of a layer beside what it reads: its kernels begin and end, attention waits
NODE_SECONDS = 0.18e-6  # of a layer, for each node of a tree
TREE_SECONDS = 0.12e-3  # of a step with a tree: its draft and its acceptance
DECODED = 28.1  # weights of 4 or 8 bits a cycle and multiprocessor, with one row
MORE_ROWS, SQUARED_ROWS = 29.5, 32.7  # how many more take as long again, and again by their square

# FLOP a cycle and multiprocessor of dense 16-bit products with 32-bit sums, by compute capability;
# of a GeForce card where those of one capability differ, which are the slower ones
CYCLE = {
    **{(7, 0): 1024, (7, 5): 512, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}


@dataclass(frozen=True)
class Gpu:
    """flops: the peak of dense 16-bit products with 32-bit sums, in FLOP/s; bandwidth: in bytes/s;
    both from the vendor's data sheet. cycles: of all multiprocessors together, a second."""

    name: str
    flops: float
    bandwidth: float
    cycles: float

    def seconds(self, flops: float, moved: float) -> float:
        """An operator by the roofline, at what a GPU reaches of its data sheet. moved: bytes."""
        return max(flops / (PEAK_SHARE * self.flops), moved / (SHARE * self.bandwidth))

    def decoding_seconds(self, weights: float, rows: int) -> float:
        """Products of `rows` rows with weights of 4 or 8 bits, by our kernel, whatever it reads."""
        more = rows - 1
        rows_cost = 1 + more / MORE_ROWS + (more / SQUARED_ROWS) ** 2
        return weights / (DECODED * self.cycles) * rows_cost


def beside_seconds(layers: int, nodes: int) -> float:
    """What a step of `nodes` nodes, root included, takes beside reading and arithmetic."""
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
    """The GPU that torch.cuda.get_device_properties tells of: by its name where that is known, else
    by its clocks, multiprocessors and memory; None where they do not tell it."""
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
