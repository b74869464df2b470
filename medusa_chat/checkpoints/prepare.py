"""Prepare: a model that was read, made ready to decode on its device."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from medusa_chat.checkpoints import cuda_graph_trial, native_build
from medusa_chat.checkpoints.kernel_trial import try_kernels
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import cpu_threads, native
from medusa_chat.decoding.backends.linear4 import release
from medusa_chat.decoding.backends.native.blocks import AS_IT_IS, Keep, Rounded
from medusa_chat.decoding.backends.native.linear import kept_bytes
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.step import StepBackend, TorchStep
from medusa_chat.errors import ModelError
from medusa_chat.trees.calibration import Calibration
from medusa_chat.units import gb

GRAPHS = "MEDUSA_CHAT_GRAPHS"  # "0": steps on a CUDA device run without CUDA graphs
NOT_THEIRS = "the numbers of our C library were not theirs"
UNROUNDED = (
    "int8 and nf4 on a CPU need our C library, which does not work here (the log says why): "
    "choose --precision bf16"
)


def prepare(
    model: Any,
    heads: MedusaHeads | None,
    device: torch.device,
    context: int,
    calibration: Calibration | None = None,
    is_spread: bool = False,
    keep: Keep = AS_IT_IS,
) -> tuple[StepBackend, Sequence[str]]:
    """What runs the steps of the model as a backbone, with submodules replaced by faster ones, and
    a sentence for each change. is_spread: it lies on several devices, and is left as it is. keep:
    how its weights lie in memory where our C multiplies them. Raises ModelError where they are to
    be rounded and our C cannot multiply them."""
    can_run = device.type == "cpu" and not is_spread and native.can_run(model, keep)
    if keep.dtype is not None:
        native.convert(model, keep.dtype)
    if heads is not None:
        heads.read_roots(model.get_input_embeddings())
    if is_spread:
        return TorchStep(Backbone(model, context)), []  # accelerate's hooks stay
    if device.type == "cpu":
        backend, why, notes = _on_cpu(model, heads, context, calibration, keep, can_run)
    else:
        backend, why, notes = _on_gpu(model, heads, device, context, calibration)
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


def _on_gpu(
    model: Any,
    heads: MedusaHeads | None,
    device: torch.device,
    context: int,
    calibration: Calibration | None,
) -> tuple[StepBackend, str, list[str]]:
    """See prepare; the second is why it runs by no other."""
    notes = replace_submodules(model)
    backbone = Backbone(model, context)
    notes += _use_shortlist(backbone, heads, calibration)
    if device.type != "cuda":
        return TorchStep(backbone), "", notes
    torch.cuda.set_device(backbone.device)  # Triton launches a kernel on the current one
    notes += try_kernels(backbone)
    if os.environ.get(GRAPHS) == "0":
        return TorchStep(backbone), "", notes
    return *cuda_graph_trial.try_cuda_graphs(backbone, heads), notes


def _on_cpu(
    model: Any,
    heads: MedusaHeads | None,
    context: int,
    calibration: Calibration | None,
    keep: Keep,
    can_run: bool,
) -> tuple[StepBackend, str, list[str]]:
    """The same on a CPU. can_run: whether our C knows such a model."""
    settled = cpu_threads.settle(model, *filter(None, [heads]))
    library = native_build.library() if can_run or isinstance(keep, Rounded) else None
    lay_out = threads = None
    if library is not None:
        threads = native.NativeThreads(library, cpu_threads.of_native(model))
        if can_run:
            lay_out = native.layout(model, threads, keep)
        elif isinstance(keep, Rounded):
            native.round_linears(model, threads, keep)
    if isinstance(keep, Rounded) and (threads is None or can_run and lay_out is None):
        raise ModelError(UNROUNDED)
    if keep.dtype is not None and lay_out is None:
        native.convert(model, keep.dtype, is_whole=True)
    notes = replace_submodules(model, packs=lay_out is None, lay_out=lay_out) + release(model)
    copy_out_of_files(model)
    backbone = Backbone(model, context)
    notes += [*_use_shortlist(backbone, heads, calibration), settled]
    found = None
    if lay_out is not None and threads is not None:
        found = native.native_step(backbone, heads, threads, keep)
    if (size := kept_bytes(model)) > 0:
        notes.append(_said_of_kept(keep, size))
    if found is None:
        why = "" if not can_run else NOT_THEIRS if library is not None else native_build.advice()
        return TorchStep(backbone), why, notes
    if heads is None or heads.is_shared:  # no product is torch's: its threads would only spin
        torch.set_num_threads(1)
    return found, "", notes


def copy_out_of_files(model: Any) -> None:
    """Copy the weights that still lie in mapped files, so that the files can be closed: most of
    what they hold was laid out anew, and would count as this process's memory twice."""
    for number in model.parameters():
        if type(number) is not nn.Parameter or number.layout is not torch.strided:
            continue
        if number.untyped_storage().nbytes() == number.nbytes:  # no part of a merged one
            number.data = number.data.clone()


def _said_of_kept(keep: Keep, size: int) -> str:
    """What lies in memory as whole numbers, of so many bytes."""
    if isinstance(keep, Rounded):
        return f"weights are rounded to {keep.bits} bits, 32 with one scale ({gb(size)})"
    return f"matrices are multiplied as the file has them ({gb(size)}), not as they were converted"
