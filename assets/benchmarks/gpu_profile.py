"""A profile of gpu.py: what a step's kernels are, and how long they take together."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

# parts of a kernel's name (on a CPU an operator's); the first kind that one stands for counts
KINDS = {
    "attention": ("fmha", "flash", "attention", "attn", "sdpa", "_split_kernel"),
    "products": (
        *("gemm", "gemv", "nvjet", "cutlass", "cublas", "xmma", "splitk", "dot_kernel", "product"),
        *("dequantize", "aten::mm", "aten::bmm", "aten::addmm", "aten::baddbmm"),
    ),
    "copies": ("memcpy", "memset", "aten::copy_", "aten::index_copy_"),
}
SHOWN = 15  # kernels by name, those first that take longest


def kernel_sums(device: str, call: Callable[[], Any], count: int) -> dict[str, Any]:
    """Milliseconds of a call by kind of kernel, the number of kernels, and the longest by name.
    count: calls that are counted; what is to warm up was run before."""
    is_cuda = device == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU]) as found:
        for _ in range(count):
            call()
        if is_cuda:
            torch.cuda.synchronize()
    spent: Counter[str] = Counter()
    times: Counter[str] = Counter()
    for one in found.key_averages():
        if (one.device_type == DeviceType.CUDA) is is_cuda:
            own = one.self_device_time_total if is_cuda else one.self_cpu_time_total
            spent[one.key] += own / 1e3 / count
            times[one.key] += one.count
    sums = dict.fromkeys((*KINDS, "other"), 0.0)
    for name, ms in spent.items():
        sums[kind_of(name)] += ms
    longest = [[name[:120], times[name] / count, ms] for name, ms in spent.most_common(SHOWN)]
    return {
        **{f"{kind}, ms": ms for kind, ms in sums.items()},
        "kernels, ms": sum(sums.values()),
        "kernels": sum(times.values()) / count,
        "longest: name, calls, ms": longest,
    }


def kind_of(name: str) -> str:
    """The kind of a kernel, by its name."""
    low = name.lower()
    kinds = (kind for kind, words in KINDS.items() if any(word in low for word in words))
    return next(kinds, "other")
