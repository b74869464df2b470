"""Our kernels on a CUDA card: which ones a load uses, after checking that they agree with torch.

A load uses the kernels known to be faster: on this card, where `medusa-chat doctor --gpu` has timed
them (kernel_times.py), otherwise on cards of its kind. Each is compared with torch at every load,
in the model's own sizes and number format. A load times nothing.
"""

import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.nn import functional as F

from medusa_chat import __version__, paths
from medusa_chat.checkpoints.devices import describe_device, device_memory
from medusa_chat.checkpoints.tree_check import check_steps
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import (
    fused_kernels,
    quantised,
    split_attention,
    stored_linear,
)
from medusa_chat.decoding.backends.kernels.cuda_programs import KEPT, LEAST_CAPABILITY
from medusa_chat.decoding.backends.parity import agrees, share
from medusa_chat.messages import DeviceMemory

# bits and rows of each compiled product with quantised weights
PRODUCTS = {
    f"product-{bits}-bit-{rows}-rows": (bits, rows) for bits in (4, 8) for rows in quantised.BUCKETS
}
KERNELS = ("wide-logits", *PRODUCTS, "split-attention", *fused_kernels.NAMES)

# By compute capability. 9.0: on an H200, every load of the 7B and 8B shapes in fp16, bf16, nf4 and
# int8 timed each kernel and measured it as faster (assets/benchmarks/gpu-h200.json, the notes of
# the runs of 27 November; assets/benchmarks/NOTES.md, "On a GPU").
MEASURED = {(9, 0): frozenset(KERNELS)}
# No other card was measured. Those use only the kernels that move less memory than what they
# replace on any card: one kernel for several operators, no second pass over the logits, and int8
# weights that are not expanded to 16 bits at every step. Split attention and 4-bit products replace
# kernels that their authors tuned for these cards, so they wait for `doctor --gpu`.
UNMEASURED = frozenset(
    ("wide-logits", "product-8-bit-8-rows", "product-8-bit-16-rows", *fused_kernels.NAMES)
)

CHOICES = "kernels"  # in the data folder: a file for each card that was timed
CODE = "machine-code"  # folder of the data: our CUDA C++ as it was compiled for a card
MARKS = "kernels"  # in the state folder: a file for each kernel being tried
ROWS, COLUMNS = 16, 4096  # the part of the LM head's product that is compared
TOLERANCE = 1e-3  # its largest difference from fp32, as a share of the largest number


def chosen_kernels(device: torch.device) -> tuple[frozenset[str], str]:
    """Which of KERNELS this device should use, and the measurement behind it, in words."""
    timed = _read_choice(device)
    if timed is not None:
        return timed, "timed on this card by doctor --gpu"
    is_cuda = device.type == "cuda"
    capability = torch.cuda.get_device_capability(device) if is_cuda else (0, 0)
    if capability in MEASURED:
        return MEASURED[capability], "by measurements on an H200"
    return UNMEASURED, "this kind of card was not measured: run medusa-chat doctor --gpu"


def multiplies_int8(device: torch.device) -> bool:
    """Whether a load would use our product of int8 weights on a device, by its kind and the kernels
    chosen for it; the load itself still compares the product."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < LEAST_CAPABILITY:
        return False
    chosen, _ = chosen_kernels(device)
    return has_bindings() and any(PRODUCTS.get(name, (0,))[0] == 8 for name in chosen)


def has_bindings() -> bool:
    """Whether cuda-bindings are installed, for the CUDA that torch comes with: they compile our
    CUDA C++."""
    try:
        version = metadata.version("cuda-bindings")
    except metadata.PackageNotFoundError:
        return False
    return version.partition(".")[0] == (torch.version.cuda or "").partition(".")[0]


def machine_memory(device: torch.device, held: int = 0, with_swap: bool = False) -> DeviceMemory:
    """See device_memory: what a load would go by."""
    return replace(device_memory(device, held, with_swap), has_int8=multiplies_int8(device))


def keep_choice(device: torch.device, kernels: frozenset[str]) -> Path:
    """Let loads on this card use these kernels until torch, the driver or medusa-chat changes ->
    the file that records it. Raises OSError."""
    file = _choice_file(device)
    paths.write_text(file, json.dumps(_versions(device) | {"kernels": sorted(kernels)}))
    return file


def _read_choice(device: torch.device) -> frozenset[str] | None:
    kept = _read_json(_choice_file(device))
    if not _matches(kept, _versions(device)) or not isinstance(kept.get("kernels"), list):
        return None
    return frozenset(name for name in KERNELS if name in kept["kernels"])


def _choice_file(device: torch.device) -> Path:
    card = re.sub(r"\W+", "-", describe_device(device)).strip("-").lower()
    return paths.data_dir() / CHOICES / f"{card}.json"


def _versions(device: torch.device) -> dict[str, str]:
    """What timings depend on. driver: the CUDA version that it supports."""
    driver = getattr(torch._C, "_cuda_getDriverVersion", lambda: "none")
    return {
        "device": describe_device(device),
        "torch": str(torch.__version__),
        "driver": str(driver()),
        "medusa-chat": __version__,
    }


def try_kernels(backbone: Backbone) -> list[str]:
    """Let the steps of a backbone on one CUDA device use the chosen kernels that agree with torch
    -> a note on each, and one on why these were chosen."""
    chosen, why = chosen_kernels(backbone.device)
    KEPT.folder = paths.data_dir() / CODE
    uses: dict[str, Callable[[], list[str]]] = {
        # whatever the card: it reads the blocks once, and torch writes them out several times
        "stored-product": partial(stored_linear.use_kernels, backbone.model),
        "wide-logits": partial(_use_wide_logits, backbone),
        "quantised-product": partial(_use_products, backbone, chosen),
        "split-attention": partial(split_attention.use, backbone, partial(check_steps, backbone)),
        **{name: partial(fused_kernels.use, name, backbone) for name in fused_kernels.NAMES},
    }
    notes = []
    for name, use in uses.items():
        if name in KERNELS and name not in chosen:
            continue
        with marked(name, backbone.device) as mark:
            if mark is None:
                notes += use()
            else:
                notes.append(f"{name} is not used: it crashed when it was last tried (see {mark})")
    return [*notes, f"kernels chosen: {why}"]


@torch.no_grad()
def _use_wide_logits(backbone: Backbone) -> list[str]:
    """Keep logits in fp32 where the device's product can return its sums in fp32: fewer near ties,
    at which tree and plain decoding may differ."""
    head, size = backbone.lm_head, backbone.config.hidden_size
    hidden = torch.randn(ROWS, size, device=backbone.device).to(backbone.dtype)
    if not head.can_widen(hidden):
        return []
    linear: Any = head.linear
    if isinstance(linear, stored_linear.StoredLinear):  # compared when it was taken
        head.is_wide = True
        return ["LM head logits kept in fp32"]
    bias = None if linear.bias is None else linear.bias[:COLUMNS].float()

    def difference() -> float:
        ours = head.widened(hidden)[:, :COLUMNS]
        wanted = F.linear(hidden.float(), linear.weight[:COLUMNS].float(), bias)
        return share(ours, wanted)

    head.is_wide = agrees("the LM head's logits stay in 16 bits", difference, TOLERANCE)
    return ["LM head logits kept in fp32"] if head.is_wide else []


def _use_products(backbone: Backbone, chosen: frozenset[str]) -> list[str]:
    pairs = [PRODUCTS[name] for name in chosen if name in PRODUCTS]
    rows = {bits: frozenset(rows for one, rows in pairs if one == bits) for bits in (4, 8)}
    return quantised.use_products(backbone.model, backbone.dtype, rows)


@contextmanager
def marked(name: str, device: torch.device) -> Iterator[Path | None]:
    """Mark on disk that a kernel is being tried or timed, since it may crash the process. Yields
    None, or the mark that a crashed process left on this device with this version of torch: then
    the kernel must not be called."""
    mark = paths.state_dir() / MARKS / f"{name}.json"
    here = {"device": describe_device(device), "torch": str(torch.__version__)}
    left = _read_json(mark)
    if _matches(left, here) and not _runs(left):
        yield mark
        return
    process = psutil.Process()
    try:
        mine = {"pid": process.pid, "started": process.create_time()}
        paths.write_text(mark, json.dumps(here | mine))
    except OSError:
        yield None  # the disk is full or read-only: go on without a mark
        return
    yield None  # an error leaves the mark in place: the device is lost
    mark.unlink(missing_ok=True)


def _matches(read: Any, here: dict[str, str]) -> bool:
    return isinstance(read, dict) and here.items() <= read.items()


def _runs(left: dict[str, Any]) -> bool:
    """Whether the other process that left this mark still runs."""
    try:
        pid, started = left["pid"], left["started"]
        return pid != os.getpid() and psutil.Process(pid).create_time() == started
    except (KeyError, TypeError, ValueError, psutil.Error):
        return False


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8"))
    except (OSError, ValueError):
        return None
