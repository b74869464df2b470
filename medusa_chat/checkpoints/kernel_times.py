"""Kernel times: each of our kernels and the operators it replaces, timed on this card.

`medusa-chat doctor --gpu` calls this and records which kernels are faster (kernel_trial.py). The
sizes are those of Llama-3.1-8B and the weights random, in bf16 where the card has it, otherwise in
fp16; they take up to 1.1 GB.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from medusa_chat.checkpoints.kernel_trial import KERNELS, PRODUCTS, marked
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.backends import fused_kernels, split_attention
from medusa_chat.decoding.backends.fused_kernels import Sizes
from medusa_chat.decoding.backends.quantised import (
    BUCKETS,
    Int8Linear,
    Nf4Linear,
    QuantisedLinear,
)
from medusa_chat.errors import first_line

SIZES = Sizes(128_256, 4096, (32, 8), 128, 14336)  # of Llama-3.1-8B
GAIN, LOSS = 1.05, 0.98  # least speedup over what it replaces: in one case, and in every case
WIDE_LOSS = 0.9  # the same for fp32 logits, whose purpose is fewer near ties, not speed
REPEATS = 15
WARM_UPS = 3
LEAST = 2**26  # bytes that are written at once before a call
MOST_WRITES = 64

Call = Callable[[], Any]


@dataclass(frozen=True)
class KernelTime:
    """cases: (what was computed, seconds of what the kernel replaces, seconds of the kernel).
    failure: why there are no cases."""

    name: str
    cases: tuple[tuple[str, float, float], ...]
    failure: str = ""

    @property
    def is_chosen(self) -> bool:
        """Whether a load should use the kernel."""
        gains = [plain / own for _, plain, own in self.cases]
        if not gains:
            return False
        if self.name == "wide-logits":
            return min(gains) >= WIDE_LOSS
        return min(gains) >= LOSS and max(gains) >= GAIN


def time_kernels(device: torch.device) -> Iterator[KernelTime]:
    """Time all KERNELS on a CUDA device, one after the other; a failure affects that kernel only.
    Raises torch.AcceleratorError where a kernel loses the device: it is not called again there."""
    torch.cuda.set_device(device)
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = torch.bfloat16 if has_bf16 else torch.float16
    for name in KERNELS:
        with marked(name, device) as mark:
            if mark is None:
                time = _timed(name, device, dtype)
            else:
                time = KernelTime(name, (), f"it crashed when it was last tried (see {mark})")
        yield time


@torch.no_grad()
def _timed(name: str, device: torch.device, dtype: torch.dtype) -> KernelTime:
    try:
        cases = [
            (what, cuda_seconds(plain), cuda_seconds(own))
            for what, plain, own in _calls(name, device, dtype)
        ]
    except torch.AcceleratorError:
        raise
    except Exception as error:  # no Triton, no compiler, no bitsandbytes, too little memory
        return KernelTime(name, (), first_line(error))
    return KernelTime(name, tuple(cases))


def _calls(name: str, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Call, Call]]:
    """(what is computed, a call of what the kernel replaces, a call of the kernel)."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    if name == "wide-logits":
        linear = nn.Linear(SIZES.hidden, SIZES.vocabulary, False, device=device, dtype=dtype)
        head, hidden = LogitHead(linear, None), draw(16, SIZES.hidden)
        yield "16 rows", lambda: linear(hidden).float(), partial(head.widened, hidden)
    elif name == "split-attention":
        yield from split_attention.timed_calls(SIZES.heads, SIZES.width, device, dtype)
    elif name in PRODUCTS:
        bits, most = PRODUCTS[name]
        product = _random_linear(bits, 2 * SIZES.gate, SIZES.hidden, device, dtype)
        for rows in (1, most) if most == BUCKETS[0] else (most,):
            x = draw(rows, SIZES.hidden)
            yield _rows(rows), partial(product.many, x), partial(product.own, x)
    else:
        ours, reference = fused_kernels.kernel(name), fused_kernels.reference(name)
        for rows in fused_kernels.ROWS:
            given = fused_kernels.arguments(name, SIZES, rows, device, dtype, dtype)
            yield _rows(rows), partial(reference, *given), partial(ours, *given)


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _random_linear(
    bits: int, outputs: int, inputs: int, device: torch.device, dtype: torch.dtype
) -> QuantisedLinear:
    """A linear of random weights, quantised as a load quantises it."""
    if bits == 8:
        codes = torch.randint(-127, 128, (outputs, inputs), device=device).to(torch.int8)
        return Int8Linear(codes, torch.rand(outputs, device=device), None)
    import bitsandbytes as bnb

    weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
    linear = bnb.nn.Linear4bit(
        inputs, outputs, bias=False, compute_dtype=dtype, quant_type="nf4", device="meta"
    )
    packed: Any = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", module=linear)
    linear.weight = packed.to(device)
    return Nf4Linear(linear.eval())


def cuda_seconds(call: Call) -> float:
    """Median seconds of a call on the current CUDA device, by the device's clock. Before each call
    a buffer larger than its cache is written, so that weights are read from memory as in a step; it
    is written often enough that the host has queued the call before the device reaches it, since
    recorded steps do not wait for the host."""
    cache = torch.cuda.get_device_properties().L2_cache_size
    buffer = torch.empty(max(4 * cache, LEAST), dtype=torch.uint8, device="cuda")
    call()  # it may be compiled here
    torch.cuda.synchronize()
    began = perf_counter()
    call()
    queueing = perf_counter() - began
    (write,) = spans(buffer.zero_, buffer.zero_, 1)
    writes = min(1 + ceil(2 * queueing / write), MOST_WRITES)

    def before() -> None:
        for _ in range(writes):
            buffer.zero_()

    return median(spans(before, call, WARM_UPS + REPEATS)[WARM_UPS:])


def spans(before: Call, call: Call, count: int) -> list[float]:
    """The device's seconds of each of `count` calls, each after `before`, which is not timed."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in marks:
        before()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]
