"""load(): from a request to a model that decodes, phase by phase."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch

from medusa_chat.checkpoints import known_checks, native_build, weights
from medusa_chat.checkpoints.adapters import merge_adapter
from medusa_chat.checkpoints.chat_template import missing_limits
from medusa_chat.checkpoints.device_plan import DevicePlan, plan_device
from medusa_chat.checkpoints.devices import (
    cuda_remedy,
    describe_device,
    held_bytes,
    refuse_out_of_memory,
    release,
)
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.first_answers import first_answers
from medusa_chat.checkpoints.gguf_backbone import converted
from medusa_chat.checkpoints.head_weights import read_heads
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_needs import QUANTISED
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.checkpoints.reference import can_be_widened
from medusa_chat.checkpoints.shipped_heads import are_shipped
from medusa_chat.checkpoints.tokenizer import add_known_template, left_out, read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.checkpoints.tree_check import check_plain_steps, check_tree_step
from medusa_chat.checkpoints.turn_ends import end_tokens
from medusa_chat.checkpoints.usual_nodes import usual_nodes
from medusa_chat.checkpoints.weight_storage import keep_of, read_dtype
from medusa_chat.decoding.backends.native_weights import Quantised, WeightStorage
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import StepBackend
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo
from medusa_chat.trees import tuning_store
from medusa_chat.trees.auto_tree import auto_tree, expected_tokens, tree_facts
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.presets import load_tree


@dataclass
class _ReadParts:
    """What was read of a checkpoint: the backbone and the heads on their devices."""

    model: Any
    heads: MedusaHeads | None
    tokenizer: Any
    parameters: int  # a 4-bit weight holds two
    notes: list[str]

    @property
    def head_count(self) -> int:
        return len(self.heads) if self.heads is not None else 0


def load(request: LoadRequest) -> Iterator[tuple[LoadPhase, LoadedModel | None]]:
    """Load phase by phase (messages.LoadPhase); the last is "ready" with the model.

    Raises ModelError (missing, broken or refused), DeviceError, OutOfMemoryError, UsageError.
    """
    yield LoadPhase("resolve"), None
    found = yield from fetch(request)
    yield LoadPhase("read"), None
    config = weights.config_of(found)
    plan = plan_device(request, found, config)
    found = yield from converted(found, plan.precision)
    calibration = Calibration.read(found.calibration) if found.calibration else None
    found = _without_unused_heads(request, found, calibration, plan)
    with refuse_out_of_memory(plan.advice):
        keep = keep_of(found, plan)
        is_made = plan.precision in QUANTISED and not isinstance(keep, Quantised)
        if is_made and not weights.is_kept(found, config, plan.precision, plan.device):
            yield LoadPhase("quantise"), None
        parts = _read(found, config, plan, keep)
        if isinstance(keep, Quantised):
            yield LoadPhase("quantise"), None
        backend, notes = prepare(
            parts.model,
            parts.heads,
            plan.device,
            plan.context,
            calibration,
            is_spread=plan.device_map is not None,
            keep=keep,
        )
        parts.notes += [*notes, *(cuda_remedy() if request.device == "auto" else [])]
        yield LoadPhase("check"), None
        engine = _engine(found, plan, parts, backend)
    loaded, tree = _loaded_model(found, plan, parts, engine, calibration)
    yield LoadPhase("warm up"), None
    with refuse_out_of_memory(plan.advice):
        _warm_up(loaded, tree)
        if found.heads is not None and are_shipped(found.folder):
            _check_first_answers(loaded)
    release()
    yield LoadPhase("ready", loaded.info), loaded


def _without_unused_heads(
    request: LoadRequest, found: Checkpoint, calibration: Calibration | None, plan: DevicePlan
) -> Checkpoint:
    """The checkpoint without the heads that are deeper than the one tree asked for."""
    if request.tree is None or found.heads is None:
        return found
    count = found.heads.heads
    if request.tree == "auto":
        place = tuning_key(found.name, found.base, plan.precision, plan.device)
        tuned = tuning_store.read(place)
        usual = _usual_nodes(found, plan, calibration)
        tree, _ = auto_tree(calibration, count, plan.device, usual, request.nodes, tuned)
    else:
        tree = load_tree(request.tree, request.nodes)
    if not 1 <= tree.depth < count:
        return found  # a tree that is too deep is refused where it is used
    note = f"{tree.depth} of {count} heads are kept: the tree is no deeper"
    return replace(found, heads=found.heads.first(tree.depth), notes=(*found.notes, note))


def _read(found: Checkpoint, config: Any, plan: DevicePlan, keep: WeightStorage) -> _ReadParts:
    """Heads, tokenizer and backbone, the adapter merged. Raises ModelError."""
    with closing(TokenizerTrial(found.backbone)) as trial:  # while the weights are read
        heads, padding = read_heads(found, config)
        model, reading = weights.read_backbone(
            found,
            config,
            plan.precision,
            plan.device,
            plan.device_map,
            dtype=read_dtype(found, keep),
        )
        trial.refuse()
    tokenizer = read_tokenizer(found.backbone, int(config.get_text_config().vocab_size))
    template = left_out(found.backbone, tokenizer)
    template += add_known_template(tokenizer, found.template)
    template += missing_limits() if tokenizer.chat_template else []
    notes = [*found.notes, *padding, *template, *plan.notes, *reading]
    if found.adapter is not None:
        model = merge_adapter(model, found.adapter)
        notes.append(f"the LoRA adapter {found.adapter.name} is merged into the backbone")
    if heads is not None:
        heads = heads.to(device=plan.device, dtype=keep.dtype or model.dtype)
    return _ReadParts(model, heads, tokenizer, model.num_parameters(), notes)


def _engine(found: Checkpoint, plan: DevicePlan, parts: _ReadParts, backend: StepBackend) -> Engine:
    """The engine, its steps checked (tree_check.py). Adds to parts.notes. Raises ModelError for a
    backbone that decodes a tree or a text otherwise."""
    parts.notes += _checked(found, plan, backend)
    engine = Engine(backend, parts.heads, end_tokens(parts.model, parts.tokenizer))
    engine.name, engine.precision = found.name, plan.precision
    return engine


def _checked(found: Checkpoint, plan: DevicePlan, backend: StepBackend) -> list[str]:
    """What two checks found, in a sentence each: of a tree step at every load, of plain steps once
    for a model on this device. Raises ModelError."""
    backbone = backend.backbone
    difference = check_tree_step(backbone)
    agrees = "a tree step gives plain steps' logits to the bit"
    if difference > 0:
        agrees = f"a tree step agrees with plain steps (logits within {difference:.1g})"
        if backbone.dtype != torch.float32:
            agrees += ", and texts can part at near ties"
    notes = [f"attention {backbone.implementation}; {agrees}"]
    if not can_be_widened(backbone):
        return [
            *notes,
            "plain steps are not compared with eager attention: some layers are on disk",
        ]
    file = known_checks.place(found, plan.precision, backend)
    known = known_checks.read(file)
    if known is None:
        known = check_plain_steps(backbone)
        notes += filter(None, [known_checks.write(file, known)])
    return [*notes, f"plain steps agree with eager attention in fp32 (logits within {known:.1g})"]


def _loaded_model(
    found: Checkpoint,
    plan: DevicePlan,
    parts: _ReadParts,
    engine: Engine,
    calibration: Calibration | None,
) -> tuple[LoadedModel, Tree]:
    """The model with all that is told of it, and its auto tree."""
    usual, heads = _usual_nodes(found, plan, calibration), parts.head_count
    place = tuning_key(found.name, found.base, plan.precision, plan.device)
    tuned = tuning_store.read(place, parts.parameters)
    tree, why = auto_tree(calibration, heads, plan.device, usual, tuned=tuned)
    backbone = engine.backbone
    modules = [parts.model, *backbone.beside, *filter(None, [parts.heads])]
    estimate = replace(plan.needs, found=found).at(plan.precision)
    info = ModelInfo(
        name=found.name,
        backbone=found.base,
        family=parts.model.config.model_type,
        precision=plan.precision,
        device=plan.words,
        parameters=parts.parameters,
        heads=heads,
        context=plan.context,
        tree="auto",
        nodes=len(tree),
        tree_reason=why,
        memory_bytes=held_bytes(*modules) + backbone.cache.nbytes,
        notes=tuple(parts.notes),
        estimated_bytes=estimate.held if estimate else 0,
        memory=estimate.words if estimate else "",
        tree_facts=tree_facts(heads, calibration, tuned),
    )
    texts = TokenTexts(parts.tokenizer)
    loaded = LoadedModel(engine, parts.tokenizer, texts, calibration, info, usual, tuned=tuned)
    return loaded, tree


def _usual_nodes(
    found: Checkpoint, plan: DevicePlan, calibration: Calibration | None
) -> tuple[int, str]:
    heads, parameters = (found.heads.heads, found.heads.parameters) if found.heads else (0, 0)
    return usual_nodes(
        plan.device,
        plan.precision,
        plan.is_native,
        found.weights.config,
        expected_tokens(calibration, heads),
        parameters,
        found.original is not None,
    )


def tuning_key(
    name: str, backbone: str, precision: str, device: torch.device
) -> tuning_store.TuningKey:
    """Under what the tuner's result for a model is kept. backbone: see ModelInfo."""
    software = f"torch {torch.__version__}"
    if device.type == "cpu" and precision != "fp16" and native_build.compiler() is not None:
        software += " and C"
    return tuning_store.TuningKey(name, backbone, precision, describe_device(device), software)


def _check_first_answers(loaded: LoadedModel) -> None:
    said = first_answers(loaded)
    if said:
        loaded.info = replace(loaded.info, notes=(*loaded.info.notes, said))


def _warm_up(loaded: LoadedModel, tree: Tree) -> None:
    """A few steps, so that the first answer does not pay for the first call of anything."""
    engine, tries = loaded.engine, loaded.engine.backend.tries
    count = 4 + tries * (tree.depth + 1)
    prompt = [min(5, engine.backbone.vocabulary - 1)] * 4
    for drafter in ("none", "medusa" if engine.heads is not None else "prompt-lookup"):
        for temperature in (0.0, 0.7) if tries else (0.0,):
            settings = GenerationSettings(
                drafter, temperature=temperature, max_new_tokens=count, nodes=len(tree), seed=0
            )
            for _ in engine.generate(prompt, engine.drafter(settings, tree), settings):
                pass
