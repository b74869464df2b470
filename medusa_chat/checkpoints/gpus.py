"""GPUs: arithmetic, bandwidth, and an operator's time by these. Plain numbers, no torch."""

from dataclasses import dataclass
from typing import Any

SHARE = 0.9  # of the data sheet's bandwidth: what large reads reach
PEAK_SHARE = 0.75  # of the FLOP/s
KERNEL_SECONDS = 2e-6  # of a kernel that has little to do
SMALL_KERNELS = 13  # of a layer, between its products

# FLOP a cycle and multiprocessor of dense 16-bit products with 32-bit sums, by compute capability;
# of a GeForce card where those of one capability differ, which are the slower ones
CYCLE = {
    **{(7, 0): 1024, (7, 5): 512, (8, 0): 2048, (8, 6): 512, (8, 9): 512},
    **{(9, 0): 4096, (10, 0): 8192, (12, 0): 512},
}


@dataclass(frozen=True)
class Gpu:
    """flops: the peak of dense 16-bit products with 32-bit sums, in FLOP/s; bandwidth: in bytes/s;
    both from the vendor's data sheet."""

    name: str
    flops: float
    bandwidth: float

    def seconds(self, flops: float, moved: float) -> float:
        """An operator by the roofline, at what a GPU reaches of its data sheet. moved: bytes."""
        return max(flops / (PEAK_SHARE * self.flops), moved / (SHARE * self.bandwidth))


GPUS = tuple(
    Gpu(name, tera * 1e12, giga * 1e9)
    for name, tera, giga in (
        ("RTX 3090", 71, 936),
        ("RTX 4090", 165, 1008),
        ("RTX 5090", 210, 1792),
        ("A40", 150, 696),
        ("A6000", 155, 768),
        ("A100-80GB-PCIe", 312, 1935),
        ("H100", 989, 3350),
        ("H200", 989, 4800),
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
    flops, bandwidth = cycle * count * clock * 1e3, 2 * memory * 1e3 * width / 8  # clocks in kHz
    return Gpu(properties.name, flops, bandwidth) if flops and bandwidth else None
