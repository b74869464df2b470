"""TrainingSetup and Plan: the backbone of a training, how it runs, and what that will need."""

import os
import shutil
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat.checkpoints import devices, native_build, weights
from medusa_chat.checkpoints.device_plan import refuse_rounding
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.model_sizes import sizes
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.families import native_supports, needs_eager
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadPhase, LoadRequest
from medusa_chat.training.events import Stage
from medusa_chat.training.examples import Example, group_by_length
from medusa_chat.training.joint import adapter_size, is_tied
from medusa_chat.training.loss import ROWS_AT_ONCE, ShortVocabulary
from medusa_chat.training.packed_model import PackedModel, read_packed
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.units import gb

CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # most memory of cached hidden states
FEW_STEPS = 50


@dataclass(frozen=True)
class Base:
    """The backbone of the heads. name: as the user gave it; folder: None for a Hub id."""

    name: str
    folder: Path | None

    def seen_from(self, output: Path) -> str:
        """The value of `base_model_name_or_path` in `output`: a Hub id; a relative path for a
        folder beside or below, so that both can be moved together; otherwise the absolute path."""
        if self.folder is None:
            return self.name
        folder, near = self.folder.resolve(), output.resolve().parent
        is_near = folder.is_relative_to(near)
        return folder.relative_to(near).as_posix() if is_near else str(folder)


@dataclass
class TrainingSetup:
    """The backbone of a training. source: where its files are; length: most tokens of an example;
    notes: what was decided and left out, for the plan; is_packed: whether a GGUF file is used as it
    is (PackedModel); model: None until it is read."""

    base: Base
    source: Checkpoint
    config: Any
    tokenizer: Any
    device: torch.device
    precision: str
    length: int
    notes: list[str]
    is_packed: bool = False
    model: Any = None

    @property
    def vocabulary(self) -> int:
        """Tokens that the backbone has logits for."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def lm_head(self) -> LogitHead:
        """The backbone's output layer: hidden [..., d] -> logits [..., V]."""
        return LogitHead(self.model.get_output_embeddings(), self.config.get_text_config())

    def read_model(self) -> None:
        """Read the frozen backbone, with the fastest attention of its family."""
        if self.is_packed:
            self.model = read_packed(self.source.source, self.length)
            if self.model is not None:
                return
            devices.release()
            self.is_packed = False
            self.precision, reason = devices.choose_precision("auto", self.device)
            self.notes[:1] = [reason, *_unpacking(self.source, self.precision)]
        self.model = weights.read_model(self.source, self.config, self.precision, self.device)
        if not needs_eager(self.model):
            self.model.set_attn_implementation("sdpa")

    def short_vocabulary(self, recipe: Recipe, tokens: Sequence[int]) -> ShortVocabulary | None:
        """The vocabulary of the heads' loss, from a shortlist. None: all tokens, also where the LM
        head that the heads share is trained too. A note says it."""
        is_frozen = recipe.method == "medusa-1" or is_tied(self.model)
        if recipe.own_lm_head or not is_frozen:
            return None
        short = ShortVocabulary.of(tokens, self.lm_head)
        if short is not None:
            self.notes.append(
                f"the heads learn the {len(tokens):,} tokens that make up 98 % of the answers, of "
                f"{self.vocabulary:,}: they draft no others"
            )
        return short


def prepare_setup(
    request: TrainRequest, group: ProcessGroup
) -> Generator[Stage, None, TrainingSetup]:
    """Everything about the backbone except its weights; a Stage for its download. Raises
    ModelError, DeviceError, UsageError."""
    source: Checkpoint = yield from stages_of(
        fetch(LoadRequest(request.backbone, offline=request.offline))
    )
    if source.adapter is not None or (source.heads is not None and source.heads.is_whole):
        raise ModelError(
            f"{request.backbone} has Medusa heads already: give its backbone as --backbone"
        )
    config = weights.config_of(source)
    device = devices.choose_device(_device_name(request.device, group))
    precision, reason = devices.choose_precision(request.precision, device)
    is_packed = group.size == 1 and _stays_packed(request, source, config, device)
    if is_packed:
        precision = source.weights.stored
        reason = f"precision {precision}: the file as it is, since its weights stay as they are"
    base = Base(source.repo or request.backbone, None if source.repo else source.source)
    refuse_rounding(source, precision)
    source = with_settings(source)
    with closing(TokenizerTrial(source.settings)) as trial:
        trial.refuse()
    tokenizer = read_tokenizer(source.settings)
    _require_teacher(request.recipe, precision)
    length = _sequence_length(request, config.get_text_config())
    notes = [reason, *(() if is_packed else _unpacking(source, precision))]
    given = base, source, config, tokenizer, device, precision, length, notes
    return TrainingSetup(*given, is_packed)


def _stays_packed(
    request: TrainRequest, source: Checkpoint, config: Any, device: torch.device
) -> bool:
    """Whether a GGUF file is used as it is: by our C on a CPU, where nothing of it is trained."""
    is_open = request.precision == "auto" and device.type == "cpu"
    is_frozen = request.recipe.method == "medusa-1"
    is_known = source.weights.packed > 0 and native_supports(config.get_text_config().to_dict())
    return is_open and is_frozen and is_known and native_build.library() is not None


def _unpacking(source: Checkpoint, precision: str) -> Iterator[str]:
    """What it takes to train on a packed GGUF file."""
    if source.weights.packed:
        size = sizes(source.weights.config).parameters * (4 if precision == "fp32" else 2)
        yield f"{source.source.name} is unpacked to {precision} in memory: {gb(size)}"


def stages_of(steps: Iterator[tuple[LoadPhase, Any]]) -> Generator[Stage, None, Any]:
    """The result of the phases of a load; a Stage for each new note, and for a download without
    one."""
    last, result = "", None
    while True:
        try:
            phase, result = next(steps)
        except StopIteration as end:
            return result if end.value is None else end.value
        what = phase.note or ("downloading the model" if phase.name == "download" else "")
        if what and what != last:
            last = what
            yield Stage(what)


def _device_name(name: str, group: ProcessGroup) -> str:
    """The device of this process; each of several processes has its own GPU."""
    if group.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def _require_teacher(recipe: Recipe, precision: str) -> None:
    """Raises UsageError for a quantised backbone that would be its own teacher."""
    if recipe.distill and recipe.method == "medusa-2" and precision in ("nf4", "int8"):
        raise UsageError(
            f"--distill with medusa-2 needs a teacher that is not quantised, and --precision is "
            f"{precision}: use bf16, or omit --distill"
        )


def _sequence_length(request: TrainRequest, text: Any) -> int:
    """Most tokens of an example: the option's, or the recipe's within the context."""
    recipe_length = request.recipe.sequence_length
    context = int(getattr(text, "max_position_embeddings", None) or recipe_length)
    length = request.sequence_length or min(recipe_length, context)
    if length > context:
        raise UsageError(
            f"--sequence-length is {length}, but the backbone's context is {context}: give at most "
            f"{context}"
        )
    return length


def resolved(recipe: Recipe, examples: Sequence[Example], setup: TrainingSetup) -> Recipe:
    """The recipe with its number of steps, a warmup within them, and whether hidden states are
    cached: where there is a second epoch and enough memory."""
    labels = _labels(examples)
    width = setup.config.get_text_config().hidden_size * (2 if setup.precision != "fp32" else 4)
    caches = recipe.cache and recipe.method == "medusa-1" and recipe.epochs > 1
    caches &= labels * width <= CACHE_BYTES.get(setup.device.type, 0)
    # from cached states about as many as batches of whole examples
    in_epoch = max(labels // recipe.batch_labels, 1)
    if not caches:
        in_epoch = len(group_by_length(examples, recipe.batch_tokens, recipe.seed))
    steps = recipe.max_steps or recipe.epochs * in_epoch
    warmup = min(recipe.warmup_steps, steps // 4)
    return replace(recipe, cache=caches, max_steps=steps, warmup_steps=warmup)


def _labels(examples: Iterable[Example]) -> int:
    return sum(sum(example.is_label) for example in examples)


# ---------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Plan:
    """The amount of work of a training. rows, held_out: examples. tokens, labels: of both.
    memory_bytes: the estimated peak. disk_bytes: of all that is written; free_bytes: free where it
    is written. notes: what was decided and why."""

    backbone: str
    method: str
    recipe: str
    device: str
    precision: str
    rows: int
    held_out: int
    tokens: int
    labels: int
    steps: int
    memory_bytes: int
    disk_bytes: int
    free_bytes: int
    notes: tuple[str, ...] = ()


def plan(
    request: TrainRequest,
    recipe: Recipe,
    setup: TrainingSetup,
    heads: MedusaHeads,
    examples: Sequence[Example],
    held_out: Sequence[Example],
    group: ProcessGroup = ALONE,
    has_inputs: bool = False,
) -> Plan:
    """The plan of a training by a resolved recipe. has_inputs: whether its hidden states are on
    the disk from before. Raises UsageError where the disk has too little space."""
    model = setup.model
    is_joint = recipe.method == "medusa-2"
    is_one = list(examples) == list(held_out)  # a single conversation is in both
    every = examples if is_one else (*examples, *held_out)
    adapter = adapter_size(model, recipe.lora_rank) if is_joint else 0
    width = setup.config.get_text_config().hidden_size * model.dtype.itemsize
    cached = _labels(examples) * width if recipe.cache and group.size == 1 else 0
    needed = disk_bytes(model, heads, adapter, is_joint and recipe.output == "merged")
    needed += 0 if has_inputs else cached
    return Plan(
        backbone=request.backbone,
        method=recipe.method,
        recipe=recipe.name,
        device=str(setup.device),
        precision=setup.precision,
        rows=len(examples),
        held_out=len(held_out),
        tokens=sum(len(example.ids) for example in every),
        labels=_labels(every),
        steps=recipe.steps * (2 if is_joint and recipe.stages == 2 else 1),
        memory_bytes=memory_bytes(model, heads, recipe.batch_tokens, adapter, cached),
        disk_bytes=needed,
        free_bytes=_require_space(request.output.resolve().parent, needed),
        notes=(*setup.notes, *_plan_notes(is_one, recipe.steps, is_joint and is_tied(model))),
    )


def _plan_notes(is_one: bool, steps: int, is_tied_joint: bool) -> Iterator[str]:
    if is_one:
        yield "there is only one row: the held-out figures come from the training data"
    if steps < FEW_STEPS:
        yield (
            f"heads learn little in {steps} steps: raise --epochs or --max-steps, or give more data"
        )
    if is_tied_joint:
        yield "the LM head is tied to the embeddings: the adapter leaves both alone"


def memory_bytes(
    model: Any, heads: MedusaHeads, batch_tokens: int, adapter: int, cached: int
) -> int:
    """Peak memory: weights; parameters, gradients (twice: a new one is added to the old) and
    optimizer state of all that is trained; the largest tensors of a batch; `cached` bytes of hidden
    states. adapter: parameters of the adapter."""
    config = model.config.get_text_config()
    frozen = devices.held_bytes(model)
    if isinstance(model, PackedModel):
        frozen += model.engine.backbone.cache.nbytes
    states = 2 if heads.weight.is_cuda else 8  # AdamW in 8 bit there
    trained = (sum(p.numel() for p in heads.parameters()) + adapter) * (12 + states)
    logits = 3 * 4 * ROWS_AT_ONCE * len(heads) * config.vocab_size
    layers = config.num_hidden_layers if adapter else 2
    held = 12 * model.dtype.itemsize + (22 * 4 if adapter else 0)  # peft's inputs in fp32
    passes = batch_tokens * config.hidden_size * held * layers
    return int(frozen + trained + logits + passes + cached)


def disk_bytes(model: Any, heads: MedusaHeads, adapter: int, is_merged: bool) -> int:
    """Bytes of the checkpoint and of the training state beside it, twice while that is replaced."""
    size = sum(p.numel() for p in heads.parameters())
    state = (size + adapter) * 12
    whole = model.dtype.itemsize * model.num_parameters() if is_merged else adapter * 4
    return int(2 * state + size * 4 + whole)


def _require_space(folder: Path, needed: int) -> int:
    """Free bytes in the folder. Raises UsageError when they are fewer than `needed`."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(
            f"{folder} has {gb(free)} free and the training needs {gb(needed)}: "
            "free some disk space, or use another --output"
        )
    return free
