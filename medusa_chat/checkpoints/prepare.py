"""Prepare: a model that was read, made ready to decode on its device."""

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

from medusa_chat.checkpoints import cuda_graph_trial, native_build
from medusa_chat.checkpoints.kernel_trial import try_kernels
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import cpu_threads, native
from medusa_chat.decoding.backends.linear4 import release
from medusa_chat.decoding.backends.native.blocks import Stored, nothing_stored
from medusa_chat.decoding.backends.native.linear import kept_bytes
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.step import StepBackend, TorchStep
from medusa_chat.trees.calibration import Calibration
from medusa_chat.units import gb

GRAPHS = "MEDUSA_CHAT_GRAPHS"  # "0": steps on a CUDA device run without CUDA graphs


def prepare(
    model: Any,
    heads: MedusaHeads | None,
    device: torch.device,
    context: int,
    calibration: Calibration | None = None,
    is_spread: bool = False,
    stored: Stored = nothing_stored,
) -> tuple[StepBackend, Sequence[str]]:
    """What runs the steps of the model as a backbone, with submodules replaced by faster ones, and
    a sentence for each change. is_spread: it lies on several devices, and is left as it is. stored:
    the weights as a GGUF file has them, which the pass in C keeps so."""
    if heads is not None:
        heads.read_roots(model.get_input_embeddings())
    if is_spread:
        return TorchStep(Backbone(model, context)), []  # accelerate's hooks stay
    can_run = native.can_run(model)
    library = native_build.library() if can_run else None
    notes = replace_submodules(model, packs=library is None)
    notes += release(model)
    backbone = Backbone(model, context)
    notes += _use_shortlist(backbone, heads, calibration)
    backend: StepBackend = TorchStep(backbone)
    why = ""
    if device.type == "cuda":
        torch.cuda.set_device(backbone.device)  # Triton launches a kernel on the current one
        notes += try_kernels(backbone)
    if device.type == "cuda" and os.environ.get(GRAPHS) != "0":
        backend, why = cuda_graph_trial.try_cuda_graphs(backbone, heads)
    elif device.type == "cpu":
        notes.append(cpu_threads.settle(model, *filter(None, [heads])))
        if can_run:
            backend, why = _native_step(backbone, heads, library, stored)
            if (blocks := kept_bytes(model)) > 0:
                notes.append(
                    f"weights stay as the file has them ({gb(blocks)}): each step multiplies them "
                    "so, without rounding them to bf16"
                )
    notes.append(f"each step runs by {backend.name}{why and f': {why}'}")
    return backend, notes


def is_native(backend: StepBackend) -> bool:
    """Whether the pass of its steps is our C."""
    return isinstance(backend, native.NativeStep)


def _use_shortlist(
    backbone: Backbone, heads: MedusaHeads | None, calibration: Calibration | None
) -> list[str]:
    """Give the calibration's shortlist of tokens to the heads; what to tell."""
    if heads is None or calibration is None:
        return []
    tokens, ignored = calibration.shortlist_of(backbone.vocabulary)
    if not heads.shorten(tokens, backbone.lm_head):
        return ignored
    count, whole = len(tokens), backbone.vocabulary
    return [f"drafts are taken from {count:,} of {whole:,} tokens; the text is the same"]


def _native_step(
    backbone: Backbone,
    heads: MedusaHeads | None,
    library: ctypes.CDLL | None,
    stored: Stored,
) -> tuple[StepBackend, str]:
    """Steps whose pass is the C library's, where there is one and its results agree; else torch's,
    and why."""
    if library is None:
        return TorchStep(backbone), "with a C compiler (gcc or clang) several times faster"
    threads = native.NativeThreads(library, cpu_threads.of_native(backbone.model))
    found = native.native_step(backbone, heads, threads, stored)
    if found is None:
        return TorchStep(backbone), "the numbers of our C library were not theirs"
    if heads is None or heads.is_shared:  # no product is torch's: its threads would only spin
        torch.set_num_threads(1)
    return found, ""
