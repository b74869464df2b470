"""load(): from a request to a model that decodes, phase by phase; dry_load(): without values."""

import tempfile
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from medusa_chat.checkpoints import gguf_settings, weights
from medusa_chat.checkpoints.adapters import merge_adapter, with_adapter
from medusa_chat.checkpoints.chat_template import missing_limits, renderer
from medusa_chat.checkpoints.device_plan import DevicePlan, plan_device
from medusa_chat.checkpoints.devices import (
    cuda_remedy,
    held_bytes,
    refuse_out_of_memory,
    release,
)
from medusa_chat.checkpoints.draft_model import (
    ReadDraft,
    fetch_drafts,
    read_drafts,
    refuse_drafts,
    require_vocabulary,
)
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.head_weights import read_heads
from medusa_chat.checkpoints.known_checks import KnownChecks
from medusa_chat.checkpoints.licence import licence_here
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory_needs import QUANTISED
from medusa_chat.checkpoints.packing import Packing
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.checkpoints.sampling_defaults import sampling_defaults
from medusa_chat.checkpoints.shipped_heads import are_shipped
from medusa_chat.checkpoints.step_prior import step_prior
from medusa_chat.checkpoints.tokenizer import add_known_template, left_out, read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.checkpoints.tree_check import check_load
from medusa_chat.checkpoints.turn_ends import end_tokens
from medusa_chat.checkpoints.weight_storage import keep_of, read_dtype
from medusa_chat.checkpoints.weights import read_generation_config
from medusa_chat.decoding.backends.native_weights import Quantised, WeightStorage
from medusa_chat.decoding.budget import PassCost
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.engine import Engine
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import StepBackend
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo
from medusa_chat.trees.auto_tree import source_tree, tree_facts
from medusa_chat.trees.calibration import Calibration
from medusa_chat.trees.presets import load_tree

QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Give me three tips for a good night's sleep.",
    "Write a short letter to a friend who has moved away.",
    "How does a bicycle stay upright?",
)
TOKENS = 24  # of each answer
NODES = 4  # a second in all on two cores
FAR = 0.4  # of the drafted tokens that the calibration promises: less is no chance any more


@dataclass
class _ReadParts:
    """What was read of a checkpoint: the backbone and the heads on their devices."""

    model: Any
    heads: MedusaHeads | None
    tokenizer: Any
    parameters: int  # a 4-bit weight holds two
    notes: list[str]
    template: str  # whose chat template the tokenizer has, in words
    draft: ReadDraft | None = None

    @property
    def head_count(self) -> int:
        return len(self.heads) if self.heads is not None else 0


def load(
    request: LoadRequest, packing: Packing | None = None
) -> Generator[tuple[LoadPhase, LoadedModel | None], None, None]:
    """Load phase by phase (messages.LoadPhase); the last is "ready" with the model. packing: what
    was packed of it before; the caller stops it.

    Raises ModelError (missing, broken or refused), DeviceError, OutOfMemoryError, UsageError.
    """
    yield LoadPhase("resolve"), None
    refuse_drafts(request)
    found = yield from fetch(request)
    drafts = yield from fetch_drafts(request, found)
    yield LoadPhase("read"), None
    config = weights.config_of(found)
    plan = plan_device(request, found, config)
    if plan.unpacks:
        yield LoadPhase("read", note=plan.unpacks), None
    found = with_settings(found)
    for draft in drafts:
        if isinstance(draft, Checkpoint):
            require_vocabulary(draft, found)
    calibration = Calibration.read(found.calibration) if found.calibration else None
    found = _without_unused_heads(request, found, calibration)
    with refuse_out_of_memory(plan.advice):
        keep = keep_of(found, plan, packing)
        is_made = plan.precision in QUANTISED and not isinstance(keep, Quantised)
        if is_made and not weights.is_kept(found, config, plan.precision, plan.device):
            yield LoadPhase("quantise"), None
        parts = _read(found, config, plan, keep)
        if isinstance(keep, Quantised):
            yield LoadPhase("quantise"), None
        known = KnownChecks.of(found, plan.precision, plan.device, plan.context)
        backend, notes = prepare(
            parts.model,
            parts.heads,
            plan.device,
            plan.context,
            calibration,
            is_spread=plan.device_map is not None,
            keep=keep,
            known=known,
        )
        parts.notes += [*notes, *(cuda_remedy() if request.device == "auto" else [])]
        yield LoadPhase("check"), None
        engine = _engine(found, plan, parts, backend, known)
        if drafts:
            given = parts.model, parts.tokenizer, engine.backbone, parts.parameters, plan
            parts.draft = read_drafts(request, drafts, *given)
            engine.follow(parts.draft.drafter)
    loaded = _loaded_model(found, plan, parts, engine, calibration)
    yield LoadPhase("warm up"), None
    with refuse_out_of_memory(plan.advice):
        _warm_up(engine, loaded.auto_tree(loaded.info.nodes).tree)
        engine.times = loaded.times  # the first call of anything teaches nothing
        if found.heads is not None and are_shipped(found.folder):
            _check_first_answers(loaded)
    release()
    yield LoadPhase("ready", loaded.info), loaded


def _without_unused_heads(
    request: LoadRequest, found: Checkpoint, calibration: Calibration | None
) -> Checkpoint:
    """The checkpoint without the heads that are deeper than the one tree asked for."""
    is_open = request.tree == "auto" and request.nodes is None
    if request.tree is None or found.heads is None or is_open:
        return found
    count = found.heads.heads
    if request.tree == "auto":
        tree = source_tree(calibration, count).head(request.nodes or 1)
    else:
        tree = load_tree(request.tree, request.nodes)
    if not 1 <= tree.depth < count:
        return found  # a tree that is too deep is refused where it is used
    note = f"{tree.depth} of {count} heads are kept: the tree is no deeper"
    return replace(found, heads=found.heads.first(tree.depth), notes=(*found.notes, note))


def _read(found: Checkpoint, config: Any, plan: DevicePlan, keep: WeightStorage) -> _ReadParts:
    """Heads, tokenizer and backbone, the adapter merged. Raises ModelError."""
    with closing(TokenizerTrial(found.settings)) as trial:  # while the weights are read
        heads, padding = read_heads(found, config)
        model, reading = weights.read_backbone(
            found,
            config,
            plan.precision,
            plan.device,
            plan.device_map,
            dtype=read_dtype(found, keep),
            is_packed=plan.is_packed,
        )
        trial.refuse()
    tokenizer = read_tokenizer(found.settings, int(config.get_text_config().vocab_size))
    is_own = bool(tokenizer.chat_template)
    told = left_out(found.settings, tokenizer)
    told += add_known_template(tokenizer, found.template)
    told += missing_limits() if tokenizer.chat_template else []
    notes = [*found.notes, *padding, *told, *plan.notes, *reading]
    known = f"the known one for {found.template.repo}" if found.template else "none"
    template = "the model's own" if is_own else known
    if found.adapter is not None:
        model = merge_adapter(model, found.adapter)
        notes.append(f"the LoRA adapter {found.adapter.name} is merged into the backbone")
    if heads is not None:
        heads = heads.to(device=plan.device, dtype=keep.dtype or model.dtype)
    return _ReadParts(model, heads, tokenizer, model.num_parameters(), notes, template)


def _engine(
    found: Checkpoint,
    plan: DevicePlan,
    parts: _ReadParts,
    backend: StepBackend,
    known: KnownChecks,
) -> Engine:
    """The engine, its steps checked (tree_check.py). Adds to parts.notes. Raises ModelError for a
    backbone that decodes a tree or a text otherwise."""
    parts.notes += check_load(known, backend)
    engine = Engine(backend, parts.heads, end_tokens(parts.model, parts.tokenizer))
    engine.name, engine.precision = found.name, plan.precision
    return engine


def _loaded_model(
    found: Checkpoint,
    plan: DevicePlan,
    parts: _ReadParts,
    engine: Engine,
    calibration: Calibration | None,
) -> LoadedModel:
    """The model with all that is told of it."""
    heads, backbone, draft = parts.head_count, engine.backbone, parts.draft
    modules = [parts.model, *backbone.beside, *filter(None, [parts.heads])]
    estimate = replace(plan.needs, found=found).at(plan.precision)
    times = step_prior(
        plan.device,
        plan.precision,
        plan.is_native,
        found.weights.config,
        found.heads.parameters if found.heads else 0,
        plan.is_packed,
        engine.backend.tries,
    )
    sampling, said = sampling_defaults(parts.model.generation_config)
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
        nodes=1,
        tree_reason="",
        memory_bytes=held_bytes(*modules) + backbone.cache.nbytes + (draft.bytes if draft else 0),
        notes=(*parts.notes, *said, *(draft.notes if draft else ())),
        drafts=draft.names if draft else (),
        beside=draft.drafter.kind.name if draft else "",
        estimated_bytes=estimate.held if estimate else 0,
        memory=estimate.words if estimate else "",
        tree_facts=tree_facts(heads, calibration),
        sampling=sampling,
        backend=engine.backend.name,
        template=parts.template,
        licence=licence_here(found),
    )
    texts = TokenTexts(parts.tokenizer)
    loaded = LoadedModel(engine, parts.tokenizer, texts, calibration, info, times)
    if draft is not None:
        loaded.pass_cost = PassCost(draft.parameters / parts.parameters)
    tree = loaded.auto_tree()
    loaded.info = replace(info, nodes=tree.nodes, tree_reason=tree.why)
    return loaded


def _check_first_answers(loaded: LoadedModel) -> None:
    said = first_answers(loaded)
    if said:
        loaded.info = replace(loaded.info, notes=(*loaded.info.notes, said))


def _warm_up(engine: Engine, tree: Tree) -> None:
    """A few steps, so that the first answer does not pay for the first call of anything."""
    tries = engine.backend.tries
    count = 4 + tries * (tree.depth + 1)
    prompt = [min(5, engine.backbone.vocabulary - 1)] * 4
    drafters = ["none", "medusa" if engine.heads is not None else "prompt-lookup"]
    drafters += [engine.follower.kind.name] if engine.follower is not None else []
    for drafter in drafters:
        for temperature in (0.0, 0.7) if tries else (0.0,):
            settings = GenerationSettings(
                drafter, temperature=temperature, max_new_tokens=count, nodes=len(tree), seed=0
            )
            for _ in engine.generate(prompt, engine.drafter(settings, tree), settings):
                pass


def first_answers(loaded: LoadedModel) -> str:
    """Tokens a step of short greedy answers beside what the calibration promises, as a sentence;
    empty where there is no calibration or no chat template to ask by."""
    if loaded.calibration is None or not loaded.tokenizer.chat_template:
        return ""
    nodes = min(NODES, len(source_tree(loaded.calibration, loaded.info.heads)))
    auto = loaded.auto_tree(nodes)
    found, expected = _tokens_a_step(loaded, auto.tree), auto.expected[-1]
    said = (
        f"first answers: {found:.2f} tokens a step with {nodes} nodes, where the calibration "
        f"expects {expected:.2f}"
    )
    if found - 1 < FAR * (expected - 1):
        said += (
            ": these weights are not those that the heads were trained for, so that --drafter "
            "prompt-lookup may be faster"
        )
    return said


def _tokens_a_step(loaded: LoadedModel, tree: Tree) -> float:
    engine = loaded.engine
    settings = GenerationSettings("medusa", nodes=len(tree), max_new_tokens=TOKENS, seed=0)
    counts: list[int] = []
    for question in QUESTIONS:
        drafter = engine.drafter(settings, tree)
        for event in engine.generate(_ids(loaded, question), drafter, settings, details=False):
            if isinstance(event, Step):
                counts.append(len(event.token_ids))
    engine.forget()
    return sum(counts) / max(1, len(counts))


def _ids(loaded: LoadedModel, question: str) -> Sequence[int]:
    asked = [{"role": "user", "content": question}]
    text = renderer().render(loaded.tokenizer, asked, continues=False)
    ids: list[int] = loaded.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def dry_load(request: LoadRequest) -> None:
    """Read a checkpoint that lies whole on this disk. Of the backbone no value is read, so that
    numbers which are none, and what its family does otherwise in a tree, are told by a load alone.
    Raises ModelError, as a load would."""
    found = Checkpoint.find(request)
    config = weights.config_of(found)
    if found.calibration:
        Calibration.read(found.calibration)
    read_heads(found, config)
    if not found.weights.stored:
        _read_folder(found, config, found.backbone)
        return
    with tempfile.TemporaryDirectory(prefix="medusa-chat-") as folder:
        gguf_settings.write_settings(found, Path(folder))
        _read_folder(found, weights.read_config(Path(folder)), Path(folder))


def _read_folder(found: Checkpoint, config: Any, folder: Path) -> None:
    """folder: with the config and the tokenizer of the backbone."""
    with closing(TokenizerTrial(folder, plain_too=True)) as trial:
        trial.refuse()
    tokenizer = read_tokenizer(folder, int(config.get_text_config().vocab_size))
    model = weights.empty_model(found, config)
    model.generation_config = read_generation_config(folder, config)
    end_tokens(model, tokenizer)
    TokenTexts(tokenizer)
    if found.adapter is not None:
        with_adapter(model, found.adapter)
