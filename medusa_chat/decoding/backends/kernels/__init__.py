"""Kernels in Triton and in CUDA C++, and the C library's source."""

from functools import cache

import torch


@cache
def processors(device: torch.device) -> int:
    """Multiprocessors of the device; 16 for Triton's interpreter."""
    if device.type != "cuda":
        return 16
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def each_of(units: int, most: int, device: torch.device) -> int:
    """How many of these units of work one program does: a power of two, at most `most`, so that
    there is a program for every multiprocessor."""
    return 1 << (max(min(units // processors(device), most), 1).bit_length() - 1)
