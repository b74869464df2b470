"""load(): from a request to a model that decodes. The door to devices, finding and weights."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from medusa_chat.checkpoints import native_build
from medusa_chat.checkpoints.device_plan import DEFAULT_CONTEXT, Placement, place
from medusa_chat.checkpoints.devices import (
    PRECISIONS,
    choose_device,
    choose_precision,
    describe_device,
)
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.memory import fitting, held_bytes
from medusa_chat.checkpoints.prepare import prepare
from medusa_chat.decoding.tree import Tree
from medusa_chat.messages import LoadPhase, LoadRequest, ModelInfo
from medusa_chat.trees import tuning_store
from medusa_chat.trees.auto_tree import (
    auto_tree,
    rank_accuracies,
    source_tree,
    tree_facts,
    usual_nodes,
)
from medusa_chat.trees.calibration import CALIBRATION_FILE, Calibration
from medusa_chat.trees.tuning_store import Tuning

if TYPE_CHECKING:
    import torch

    from medusa_chat.decoding.candidate_budget import Grower
    from medusa_chat.decoding.detokenizer import TokenTexts
    from medusa_chat.decoding.draft_budget import Governor
    from medusa_chat.decoding.engine import Engine

__all__ = [
    "CALIBRATION_FILE",
    "DEFAULT_CONTEXT",
    "HEADS_FILE",
    "PRECISIONS",
    "Calibration",
    "Checkpoint",
    "LoadedModel",
    "auto_tree",
    "choose_device",
    "choose_precision",
    "end_tokens",
    "load",
    "rank_accuracies",
    "source_tree",
    "tuning_place",
    "usual_nodes",
]
HEADS_FILE = "medusa_lm_head.safetensors"  # the name under which we write heads


@dataclass
class LoadedModel:
    """A model ready to decode: engine, tokenizer, the default tree and what to tell about it."""

    engine: "Engine"
    tokenizer: Any
    texts: "TokenTexts"
    calibration: Calibration | None
    info: ModelInfo
    usual_nodes: int  # of its auto tree until it is tuned
    said: tuple[str, list[int]] = ("", [])  # the last text as a whole and its exact ids
    stored: Calibration | None = None  # the checkpoint's own, while a personal tree stands above it
    tuned: Tuning | None = None
    governor: "Governor | Grower | None" = None  # of the auto tree; it learns from every answer
    trees: dict[int | None, Tree] = field(default_factory=dict)  # auto, by nodes, once asked


def load(request: LoadRequest) -> Iterator[tuple[LoadPhase, LoadedModel | None]]:
    """Load phase by phase (messages.LoadPhase); the last is "ready" with the model.

    Raises ModelError (missing, broken or refused), DeviceError, OutOfMemoryError, UsageError.
    """
    yield LoadPhase("resolve"), None
    with closing(fetch(request)) as downloads:
        for phase in downloads:
            yield phase, None
    found = Checkpoint.find(request)
    yield LoadPhase("read"), None
    from medusa_chat.checkpoints import weights
    from medusa_chat.checkpoints.adapters import merge_adapter
    from medusa_chat.checkpoints.head_weights import read_heads
    from medusa_chat.decoding.detokenizer import TokenTexts
    from medusa_chat.decoding.engine import Engine

    config = weights.read_config(found.backbone)
    where = place(request, found, config)
    device, precision = where.device, where.precision
    calibration = Calibration.read(found.calibration) if found.calibration else None
    usual = usual_nodes(device, precision, where.is_native)
    found = _with_heads_for(request, found, calibration, where, usual)
    with fitting(where.advice):
        heads, padding = read_heads(found, config)
        tokenizer = weights.read_tokenizer(found.backbone)
        templates = weights.lend_template(tokenizer, found)
        if precision in weights.QUANTISED and not weights.is_kept(found, config, precision, device):
            yield LoadPhase("quantise"), None
        model, told = weights.read_backbone(found, config, precision, device, where.device_map)
        notes = [*found.notes, *padding, *templates, *where.notes, *told]
        if found.adapter is not None:
            model = merge_adapter(model, found.adapter)
            notes.append(f"the LoRA adapter {found.adapter.name} is merged into the backbone")
        heads = heads.to(device=device, dtype=model.dtype) if heads is not None else None
        parameters = model.num_parameters()  # a 4-bit weight holds two
        spread = where.device_map is not None
        yield LoadPhase("check"), None
        backbone, replaced = prepare(model, heads, where.device, where.context, calibration, spread)
        notes += replaced
        difference = backbone.check()
    engine = Engine(backbone, heads, end_tokens(model, tokenizer))
    engine.name, engine.precision = found.name, precision
    tuned = tuning_store.read(tuning_place(found.name, precision, device), parameters)
    tree, why = auto_tree(calibration, len(heads) if heads else 0, device, usual, tuned=tuned)
    notes.append(f"attention {backbone.implementation}; tree step checked ({difference:.1g})")
    parts = replace(where.needs, found=found).at(precision)
    info = ModelInfo(
        name=found.name,
        family=model.config.model_type,
        precision=precision,
        device=where.words,
        parameters=parameters,
        heads=len(heads) if heads else 0,
        context=where.context,
        tree="auto",
        nodes=len(tree),
        tree_reason=why,
        memory_bytes=held_bytes(model, *backbone.beside, *filter(None, [heads]))
        + backbone.cache.nbytes,
        has_template=bool(tokenizer.chat_template),
        notes=tuple(notes),
        estimated_bytes=parts.held if parts else 0,
        tree_facts=tree_facts(
            found.name, parameters, len(heads) if heads else 0, calibration, tuned
        ),
    )
    yield LoadPhase("warm up"), None
    loaded = LoadedModel(engine, tokenizer, TokenTexts(tokenizer), calibration, info, usual)
    loaded.tuned = tuned
    with fitting(where.advice):
        _warm_up(loaded, tree)
    yield LoadPhase("ready", info), loaded


def _with_heads_for(
    request: LoadRequest,
    found: Checkpoint,
    calibration: Calibration | None,
    where: Placement,
    usual: int,
) -> Checkpoint:
    """The checkpoint without the heads that are deeper than the one tree asked for."""
    from medusa_chat.trees.presets import load_tree

    if request.tree is None or found.heads is None:
        return found
    count = found.heads.heads
    if request.tree == "auto":
        tuned = tuning_store.read(tuning_place(found.name, where.precision, where.device))
        tree, _ = auto_tree(calibration, count, where.device, usual, request.nodes, tuned)
    else:
        tree = load_tree(request.tree, request.nodes)
    if not 1 <= tree.depth < count:
        return found  # a tree that is too deep is refused where it is used
    note = f"{tree.depth} of {count} heads are kept: the tree is no deeper"
    return replace(found, heads=found.heads.first(tree.depth), notes=(*found.notes, note))


def tuning_place(name: str, precision: str, device: "torch.device") -> tuning_store.Place:
    """Under what the tuner's result for a model is kept."""
    import torch

    software = f"torch {torch.__version__}"
    is_plain = precision in ("fp32", "bf16")
    if device.type == "cpu" and is_plain and native_build.compiler() is not None:
        software += " and C"
    return tuning_store.Place(name, precision, describe_device(device), software)


def end_tokens(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends a turn: the generation config's, and the tokenizer's where its chat
    template uses it."""
    ids = model.generation_config.eos_token_id
    found = set(ids) if isinstance(ids, (list, tuple)) else {ids}
    found.add(tokenizer.eos_token_id)
    for text in ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>"):
        if tokenizer.chat_template and text in str(tokenizer.chat_template):
            found.add(tokenizer.get_vocab().get(text))
    vocabulary = int(model.config.get_text_config().vocab_size)
    return frozenset(i for i in found if isinstance(i, int) and 0 <= i < vocabulary)


def _warm_up(loaded: LoadedModel, tree: Tree) -> None:
    """A few steps, so that the first answer does not pay for the first call of anything."""
    from medusa_chat.decoding.settings import GenerationSettings

    engine, whole = loaded.engine, loaded.engine.backbone.whole_step
    tries = whole.tries if whole is not None else 0
    count = 4 + tries * (tree.depth + 1)
    prompt = [min(5, engine.backbone.vocabulary - 1)] * 4
    for drafter in ("none", "medusa" if engine.heads is not None else "prompt-lookup"):
        for temperature in (0.0, 0.7) if tries else (0.0,):
            settings = GenerationSettings(
                drafter, temperature=temperature, max_new_tokens=count, nodes=len(tree), seed=0
            )
            for _ in engine.generate(prompt, engine.drafter(settings, tree), settings):
                pass
