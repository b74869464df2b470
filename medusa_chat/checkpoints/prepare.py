"""Prepare: a model that was read, made ready to decode on its device by a step backend."""

import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from medusa_chat.checkpoints import devices, native_build
from medusa_chat.checkpoints.gguf_rows import FileRows
from medusa_chat.checkpoints.kernel_trial import try_kernels
from medusa_chat.checkpoints.known_checks import KnownChecks
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends import native_step
from medusa_chat.decoding.backends.cuda_graph_step import ASKED, CudaGraphStep
from medusa_chat.decoding.backends.native_experts import pack_experts
from medusa_chat.decoding.backends.native_layers import PackedEmbedding, layer_packer
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_step import NativeStep
from medusa_chat.decoding.backends.native_weights import (
    UNCHANGED,
    NativeLinear,
    Quantised,
    WeightStorage,
    convert_parameters,
    quantise_linears,
    quantised_bytes,
)
from medusa_chat.decoding.backends.parity import agrees
from medusa_chat.decoding.backends.quantised import release
from medusa_chat.decoding.backends.recorded_pass import RecordedPasses
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.backends.stored_linear import store_linears, use_kernels
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import DraftRecord, Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.layer_forms import own_table
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import StepBackend, TorchStep
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import ModelError
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.shapes import cartesian
from medusa_chat.units import gb

GRAPHS = "MEDUSA_CHAT_GRAPHS"  # "0": steps on a CUDA device run without CUDA graphs
NATIVE_DISABLED = "native backend disabled: its output differs from PyTorch's"
WRONG = (
    "{} of this CPU gave wrong products when our C library was tried: portable C multiplies, slower"
)
UNPACKED = (
    "a GGUF file as it is needs our C library, which does not work here (the log says why): "
    "choose --precision bf16, which unpacks it in memory"
)
UNROUNDED = (
    "int8 and nf4 on a CPU need our C library, which does not work here (the log says why): "
    "choose --precision bf16"
)
TEXT, NEW = 9, 16  # tokens of the made-up prompt of the trial of CUDA graphs, and of its answers
STARTS = (3, 5, 8)  # of several prompts: in one a near tie may make the texts differ at once
EXACT, ROUGH = 1e-3, 0.3  # of probabilities and nats, in fp32 and in 16 bits
INSTEAD = "steps run by torch operators"
PASSES_INSTEAD = "passes of steps that are not recorded whole run by torch operators"


def prepare(
    model: Any,
    heads: MedusaHeads | None,
    device: torch.device,
    context: int,
    calibration: Calibration | None = None,
    is_spread: bool = False,
    keep: WeightStorage = UNCHANGED,
    known: KnownChecks | None = None,
) -> tuple[StepBackend, Sequence[str]]:
    """What runs the steps of the model as a backbone, with submodules replaced by faster ones, and
    a sentence for each change. is_spread: it lies on several devices, and is left as it is. keep:
    how its weights lie in memory where our C multiplies them. known: what was compared before.
    Raises ModelError where they are to be rounded and our C cannot multiply them."""
    can_run = device.type == "cpu" and not is_spread and native_step.can_run(model, keep)
    if keep.dtype is not None:
        convert_parameters(model, keep.dtype)
    if device.type != "cpu" and isinstance(keep, FileRows):
        store_linears(model, keep, device, model.dtype)
    if heads is not None and device.type != "cpu":
        heads.read_roots(model.get_input_embeddings())
    if is_spread:
        return TorchStep(Backbone(model, context)), []  # accelerate's hooks stay
    if device.type == "cpu":
        backend, why, notes = _on_cpu(model, heads, context, calibration, keep, can_run, known)
    else:
        backend, why, notes = _on_gpu(model, heads, device, context, calibration)
    notes.append(f"each step runs by {backend.name}{why and f': {why}'}")
    return backend, notes


def is_native(backend: StepBackend) -> bool:
    """Whether the pass of its steps is our C."""
    return isinstance(backend, NativeStep)


def _use_shortlist(
    backbone: Backbone, heads: MedusaHeads | None, calibration: Calibration | None
) -> list[str]:
    """Give the calibration's shortlist of tokens to the heads; what to tell."""
    if heads is None or calibration is None:
        return []
    tokens, ignored = calibration.usable_shortlist(backbone.vocabulary)
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
        return TorchStep(backbone), "", [*notes, *use_kernels(model)]
    torch.cuda.set_device(backbone.device)  # Triton launches a kernel on the current one
    notes += try_kernels(backbone)
    if os.environ.get(GRAPHS) == "0":
        return TorchStep(backbone), "", notes
    return *try_cuda_graphs(backbone, heads), notes


def copy_out_of_files(model: Any) -> None:
    """Copy the weights that still lie in mapped files, so that the files can be closed: most of
    what they hold was laid out anew, and would count as this process's memory twice."""
    for number in model.parameters():
        if type(number) is not nn.Parameter or number.layout is not torch.strided:
            continue
        if number.untyped_storage().nbytes() == number.nbytes:  # no part of a merged one
            number.data = number.data.clone()


def _on_cpu(
    model: Any,
    heads: MedusaHeads | None,
    context: int,
    calibration: Calibration | None,
    keep: WeightStorage,
    can_run: bool,
    known: KnownChecks | None,
) -> tuple[StepBackend, str, list[str]]:
    """The same on a CPU. can_run: whether our C knows such a model."""
    is_file = isinstance(keep, FileRows)
    settled = devices.settle_threads(model, *filter(None, [heads]), beside=keep.bytes)
    library = native_build.library() if can_run or is_file or isinstance(keep, Quantised) else None
    pack_layer = native = None
    if library is not None:
        native = NativeLibrary(library, devices.native_threads(model, beside=keep.bytes))
        if can_run:
            pack_layer = layer_packer(model, native, keep)
        elif is_file or isinstance(keep, Quantised):
            quantise_linears(model, native, keep)
            pack_experts(model, native, keep)
    if native is None or can_run and pack_layer is None:
        if isinstance(keep, Quantised):
            raise ModelError(UNROUNDED)
        if is_file:
            raise ModelError(UNPACKED)
    if isinstance(keep, FileRows) and native is not None:
        _pack_tables(model, native, keep)
    if heads is not None:
        heads.read_roots(model.get_input_embeddings())
    if keep.dtype is not None and pack_layer is None:
        convert_parameters(model, keep.dtype, with_linears=True)
    notes = replace_submodules(model, packs=pack_layer is None, pack_layer=pack_layer)
    notes += release(model)
    if not is_file:
        copy_out_of_files(model)
    backbone = Backbone(model, context)
    notes += [*_use_shortlist(backbone, heads, calibration), settled]
    found = None
    if pack_layer is not None and native is not None:
        compare = agrees if known is None else known.agrees
        found = native_step.attach(backbone, heads, native, keep, compare)
    if (size := quantised_bytes(model)) > 0:
        notes.append(_said_of_kept(keep, size))
    if native is not None and native.without:
        notes.append(WRONG.format(native.without))
    if found is None:
        why = NATIVE_DISABLED if library is not None else native_build.advice()
        return TorchStep(backbone), why if can_run else "", notes
    if heads is None or heads.is_shared:  # no product is torch's: its threads would only spin
        torch.set_num_threads(1)
    return found, "", notes


def _pack_tables(model: Any, native: NativeLibrary, keep: FileRows) -> None:
    """Pack the LM head of a GGUF file, and its embeddings where they are stored in blocks; a tied
    one is in memory once."""
    embedding = model.get_input_embeddings()
    is_tied = model.get_output_embeddings().weight is embedding.weight
    native_step.pack_lm_head(model, native, keep)
    own = own_table(model)
    if own is not None and own.weight.is_meta:
        table = _packed_table(model, own, native, keep)
        model.get_decoder().embed_tokens_per_layer = PackedEmbedding(table, own)
    if embedding.weight.is_meta:
        head = model.get_output_embeddings()
        table = head if is_tied else _packed_table(model, embedding, native, keep)
        model.set_input_embeddings(PackedEmbedding(table, embedding))


def _packed_table(
    model: Any, embedding: Any, native: NativeLibrary, keep: FileRows
) -> NativeLinear:
    """The weight of an embedding of the model, packed."""
    place = next(name for name, module in model.named_modules() if module is embedding)
    linear = SimpleNamespace(weight=embedding.weight, bias=None)
    return NativeLinear(linear, native, keep(f"{place}.weight", embedding.weight))


def _said_of_kept(keep: WeightStorage, size: int) -> str:
    """What lies in memory as whole numbers, of so many bytes."""
    if isinstance(keep, Quantised):
        return f"weights are rounded to {keep.bits} bits, 32 with one scale ({gb(size)})"
    return f"matrices are multiplied as the file has them ({gb(size)})"


def try_cuda_graphs(backbone: Backbone, heads: MedusaHeads | None) -> tuple[StepBackend, str]:
    """What runs this backbone's steps: CUDA graphs, if they agree with torch's operators; why not,
    if they do not. The cache is empty afterwards."""
    by_operators = TorchStep(backbone)
    if backbone.context < TEXT + 2 * NEW:
        return by_operators, "the context is too short to try CUDA graphs"
    limit = EXACT if backbone.dtype == torch.float32 else ROUGH
    trees = (ROOT, cartesian(2, 2)) if heads is not None and len(heads) > 1 else (ROOT,)

    def agree(said: str, way: CudaGraphStep | RecordedPasses) -> bool:
        is_right = agrees(
            said, lambda: max(_off_by(by_operators, way, heads, tree) for tree in trees), limit
        )
        Engine(by_operators).forget()
        return is_right

    if not agree(INSTEAD, CudaGraphStep(backbone)):
        return by_operators, "CUDA graphs failed or gave other results (see the log)"
    chosen = CudaGraphStep(backbone)  # a new one, which frees the graphs of the trial
    if not agree(PASSES_INSTEAD, RecordedPasses(backbone)):
        chosen.by_pass.stop()
    return chosen, ""


def _off_by(
    by_operators: StepBackend,
    recorded: CudaGraphStep | RecordedPasses,
    heads: MedusaHeads | None,
    tree: Tree,
) -> float:
    """The largest difference of a probability or an entropy, up to where a near tie makes the texts
    differ. Raises RuntimeError where no step after a recorded one could be compared."""
    worst, compared = 0.0, 0
    for start in STARTS:
        before = recorded.seconds
        ways = (_steps(Engine(way, heads), tree, start) for way in (by_operators, recorded))
        for number, (ours, theirs) in enumerate(zip(*ways, strict=False)):
            if ours.tokens != theirs.tokens:
                break
            worst = max(worst, *map(abs, _differences(ours, theirs)))
            compared += number >= ASKED and recorded.seconds > before
        if compared:
            return worst
    raise RuntimeError("no replayed step began like the same step by torch operators")


def _differences(ours: DraftRecord, theirs: DraftRecord) -> Iterator[float]:
    for name in ("probabilities", "entropies"):
        for a, b in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            if a is not None:
                yield a - b if a == a and b == b else torch.inf  # no number is like another


def _steps(engine: Engine, tree: Tree, start: int) -> list[DraftRecord]:
    """The drafts of the steps of a greedy answer to an artificial prompt, in order."""
    drafter = "medusa" if len(tree) > 1 else "none"
    settings = GenerationSettings(drafter=drafter, max_new_tokens=NEW, seed=0)
    prompt = [(7 * i + start) % engine.backbone.vocabulary for i in range(TEXT)]
    engine.forget()
    events = engine.generate(prompt, engine.drafter(settings, tree), settings)
    return [event.draft for event in events if isinstance(event, Step) and event.draft]
