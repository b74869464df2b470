"""Kernel trial: each of our kernels beside what it would replace, at a load on a CUDA device.

It is used where its results agree and it is faster."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from math import ceil
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import psutil
import torch
from torch.nn import functional as F

from medusa_chat import paths
from medusa_chat.checkpoints.devices import describe_device
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import fused_kernels, quantised, split_attention
from medusa_chat.decoding.backends.parity import Timer, agrees, share

FOLDER = "kernels"  # of the state: a file for each kernel that is being tried
ROWS, COLUMNS = 16, 4096  # of the LM head's product in its trial
OFF = 1e-3  # its largest difference from fp32, as a share of the largest number
LOSS = 0.9  # times as fast as the product in 16 bits with the sum's conversion, at least
REPEATS = 15
WARM_UPS = 3
LEAST = 2**26  # bytes that are written at once before a call
MOST_WRITES = 64


def try_kernels(backbone: Backbone) -> list[str]:
    """Let the steps of a backbone on one CUDA device use our kernels where they pay; a sentence for
    each that was tried.

    A kernel may fail in a way that ends the process. Each trial leaves a mark on disk until it is
    over; what left one behind is not tried again on this device with this version of torch.
    """
    kernels: dict[str, Callable[[Backbone, Timer], list[str]]] = {
        "wide-logits": _wide_logits,
        "quantised-product": _quantised_product,
        "split-attention": _split_attention,
        **{name: partial(fused_kernels.use_where_faster, name) for name in fused_kernels.NAMES},
    }
    notes = []
    for name, attempt in kernels.items():
        mark = paths.state_dir() / FOLDER / f"{name}.json"
        with _marked(mark, backbone.device) as is_safe:
            if is_safe:
                notes += attempt(backbone, cuda_seconds)
            else:
                notes.append(f"{name} is not used: its last trial did not end (see {mark})")
    return notes


@torch.no_grad()
def _wide_logits(backbone: Backbone, timer: Timer) -> list[str]:
    """Logits in fp32 where the device's product can leave its sums so: fewer near ties, in which a
    tree and plain decoding may part."""
    head, size = backbone.lm_head, backbone.config.hidden_size
    hidden = torch.randn(ROWS, size, device=backbone.device).to(backbone.dtype)
    if not head.can_widen(hidden):
        return []
    linear: Any = head.linear
    bias = None if linear.bias is None else linear.bias[:COLUMNS].float()

    def difference() -> float:
        found = head.widened(hidden)[:, :COLUMNS]
        wanted = F.linear(hidden.float(), linear.weight[:COLUMNS].float(), bias)
        return share(found, wanted)

    if not agrees("the LM head's logits stay in 16 bits", difference, OFF):
        return []
    before = timer(lambda: linear(hidden).float())
    head.is_wide = before / timer(partial(head.widened, hidden)) >= LOSS
    return ["LM head logits kept in fp32"] if head.is_wide else []


def _quantised_product(backbone: Backbone, timer: Timer) -> list[str]:
    return quantised.use_where_faster(backbone.model, backbone.dtype, timer)


def _split_attention(backbone: Backbone, timer: Timer) -> list[str]:
    return split_attention.use_where_faster(backbone, timer, partial(check_steps, backbone))


@contextmanager
def _marked(mark: Path, device: torch.device) -> Iterator[bool]:
    """Whether the last trial on this device came to its end, or still runs in another process. The
    mark says that one runs, and in which process."""
    here = {"device": describe_device(device), "torch": str(torch.__version__)}
    found = _read(mark)
    if _is_of(found, here) and not _runs(found):
        yield False
        return
    process = psutil.Process()
    try:
        mine = {"pid": process.pid, "started": process.create_time()}
        paths.write_text(mark, json.dumps(here | mine))
    except OSError:
        yield True  # a disk that is full or read-only: without a mark
        return
    yield True  # an error leaves the mark: the device is lost
    mark.unlink(missing_ok=True)


def _is_of(found: Any, here: dict[str, str]) -> bool:
    return isinstance(found, dict) and here.items() <= found.items()


def _runs(found: dict[str, Any]) -> bool:
    """Whether another process that left this mark is still there."""
    try:
        pid, started = found["pid"], found["started"]
        return pid != os.getpid() and psutil.Process(pid).create_time() == started
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False


def _read(mark: Path) -> Any:
    try:
        return json.loads(mark.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def cuda_seconds(call: Callable[[], Any]) -> float:
    """Median seconds of a call on the current CUDA device, by its own clock. A buffer larger than
    its cache is written before each, so that weights come from memory as in a step, and so often
    that the host has queued the call when the device comes to it: recorded steps wait for no
    host."""
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


def spans(before: Callable[[], Any], call: Callable[[], Any], count: int) -> list[float]:
    """The device's seconds of each of `count` calls, each after `before`, which is not timed."""
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
    for begin, end in marks:
        before()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]
