"""Times of a step on named GPUs, as the page's pace control and Compare read them."""

from typing import Any

from medusa_chat.training.gpu_step import PRECISIONS, step_time
from medusa_chat.training.hardware import GPUS, SHAPES

LENGTH = 512  # tokens before the step
SIZES = (*range(1, 17), *range(20, 65, 4), 65, 80, 96, 128, 129, 192, 256)


def gpu_times() -> dict[str, Any]:
    """{"nodes": [n ...], "sizes", "gpus", "precisions": names, "ms": {"size|GPU|precision": [ms of
    a step of n nodes ...]}, "length"}; between two n the browser draws a line."""
    return {
        "length": LENGTH,
        "nodes": SIZES,
        "sizes": [shape.name for shape in SHAPES],
        "gpus": [gpu.name for gpu in GPUS],
        "precisions": PRECISIONS,
        "ms": {
            f"{shape.name}|{gpu.name}|{precision}": [
                float(f"{step_time(shape, gpu, precision, n, LENGTH).seconds * 1000:.4g}")
                for n in SIZES
            ]
            for shape in SHAPES
            for gpu in GPUS
            for precision in PRECISIONS
        },
    }
