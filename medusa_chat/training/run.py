"""`medusa-chat train`, from the request to the checkpoint, as typed events."""

import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat import devices, weights
from medusa_chat.adapters import merge_adapter
from medusa_chat.decoding.backbone import LogitHead, needs_eager, windows
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.errors import ModelError, OutOfMemoryError, UsageError
from medusa_chat.finding import Checkpoint
from medusa_chat.messages import LoadRequest
from medusa_chat.training.accuracy import count_ranks
from medusa_chat.training.data import Example
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.examples import Encoded, encode_all, require_template, split
from medusa_chat.training.joint import (
    JointRecipe,
    adapter_tensors,
    add_adapter,
    is_tied,
    train_jointly,
)
from medusa_chat.training.output import (
    TREE_NODES,
    Base,
    Calibrated,
    heads_config,
    model_card,
    write_adapter,
    write_checkpoint,
    write_heads,
    write_json,
)
from medusa_chat.training.plan import (
    Plan,
    batch_seconds,
    disk_bytes,
    memory_bytes,
    require_room,
)
from medusa_chat.training.reading import Conversation, read_conversations
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.talks import Answered, answer_conversations
from medusa_chat.training.team import ALONE, Team
from medusa_chat.training.trainer import (
    Evaluated,
    HeadRecipe,
    TrainStep,
    epoch_of,
    new_heads,
    train_heads,
)

CACHE_BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}
CALIBRATION_TOKENS = 128
ANSWERS_DONE = "answers.done"


@dataclass(frozen=True)
class Stage:
    """A part of the work begins."""

    name: str


@dataclass(frozen=True)
class Written:
    """The checkpoint is there."""

    folder: str
    bytes: int


Event = Stage | Plan | Answered | TrainStep | Evaluated | Calibrated | Written


@dataclass
class Ground:
    """What a training stands on: the backbone and how it is run."""

    base: Base
    found: Checkpoint
    config: Any
    tokenizer: Any
    device: torch.device
    precision: str
    length: int
    packs: bool
    notes: list[str]
    model: Any = None

    @property
    def lm_head(self) -> LogitHead:
        return LogitHead(self.model.get_output_embeddings(), self.config.get_text_config())


def work_folder(output: Path) -> Path:
    """Where the state of an unfinished training lies, beside its output."""
    return output.with_name(f"{output.name}.training")


def train(request: TrainRequest, team: Team = ALONE) -> Iterator[Event]:
    """Close the generator to stop: what was done is kept, and `resume` goes on there. Raises
    MedusaChatError in one line, what can be known before a model is loaded first."""
    recipe = request.recipe
    work = work_folder(request.output)
    if team.is_first:
        _begin(request, work)
    ground = lay_ground(request, team)
    conversations = _read(request.data, recipe.distill)
    encoded = _encode(ground, conversations, recipe)
    with _fitting(request.backbone, recipe):
        ground.model = _read_model(ground)
        if recipe.distill:
            yield Stage("answers")
            yield from _distill(ground, conversations, recipe, work, team)
            encoded = _answers(ground, conversations, recipe, work)
        yield from _train(request, ground, conversations, encoded, work, team)


def lay_ground(request: TrainRequest, team: Team) -> Ground:
    """Everything of the backbone but its weights."""
    recipe = request.recipe
    found = Checkpoint.find(LoadRequest(request.backbone, offline=request.offline))
    if found.adapter is not None or (found.heads is not None and found.heads.is_whole):
        raise ModelError(f"{request.backbone} has Medusa heads already: give the backbone itself")
    config = weights.read_config(found.backbone)
    tokenizer = weights.read_tokenizer(found.backbone)
    name = request.device
    if team.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = devices.choose_device(name)
    precision, reason = devices.choose_precision(request.precision, device)
    text = config.get_text_config()
    context = int(getattr(text, "max_position_embeddings", None) or recipe.sequence_length)
    length = request.sequence_length or min(recipe.sequence_length, context)
    if length > context:
        raise UsageError(f"sequence-length is {length}: the backbone's context is {context}")
    narrow = [w for w in windows(text) if w is not None and w < length]
    notes = [reason]
    if narrow:
        notes.append(f"rows are not packed: the backbone's attention window is {narrow[0]}")
    is_here = request.backbone == "demo" or Path(request.backbone).expanduser().is_dir()
    base = Base(request.backbone, found.backbone if is_here else None)
    return Ground(base, found, config, tokenizer, device, precision, length, not narrow, notes)


def _begin(request: TrainRequest, work: Path) -> None:
    """Refuse what is in the way, and note what this training is. Raises UsageError."""
    output = request.output
    if output.exists():
        raise UsageError(f"{output} exists: give another --output, or move it away")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"cannot write {output}: its folder does not exist")
    if work.exists() and not request.resume:
        raise UsageError(f"{work} holds an unfinished training: add --resume, or remove it")
    if request.resume and not work.exists():
        raise UsageError(f"there is nothing to resume at {work}: leave --resume out")
    file = work / "request.json"
    shown = _request_json(request)
    if file.exists():
        before = json.loads(file.read_text("utf-8"))
        for key, value in shown.items():
            if before.get(key) != value:
                raise UsageError(
                    f"{work} was begun with {key} {before.get(key)}, now it is {value}: give the "
                    "same options, or remove it"
                )
    work.mkdir(exist_ok=True)
    write_json(file, shown)


def _request_json(request: TrainRequest) -> dict[str, Any]:
    """What must be the same when a training goes on."""
    chosen = asdict(request.recipe)
    data = [str(path.resolve()) for path in request.data]
    asked = {"backbone": request.backbone, "precision": request.precision}
    length = {"explicit sequence_length": request.sequence_length}
    return asked | {"data": data} | length | chosen


def _read(paths: Sequence[Path], prompts: bool) -> list[Conversation]:
    found = [one for path in paths for one in read_conversations(path, prompts)]
    if not found:
        names = ", ".join(str(path) for path in paths)
        raise UsageError(f"{names} holds no conversation: the data is empty")
    return found


def _encode(ground: Ground, conversations: list[Conversation], recipe: Recipe) -> Encoded | None:
    """None where the backbone answers itself."""
    if recipe.distill:
        require_template(ground.tokenizer, conversations)
        return None
    vocabulary = int(ground.config.get_text_config().vocab_size)
    encoded = encode_all(ground.tokenizer, conversations, ground.length, vocabulary)
    if encoded.cut:
        ground.notes.append(f"{encoded.cut} rows are cut to {ground.length} tokens")
    if encoded.left_out:
        ground.notes.append(f"{encoded.left_out} rows are left out: no answer begins within that")
    return encoded


def _read_model(ground: Ground) -> Any:
    """The frozen backbone, with the fastest attention that takes a mask of ours."""
    model = weights.read_model(ground.found, ground.config, ground.precision, ground.device)
    if not needs_eager(ground.config.get_text_config()):
        model.set_attn_implementation("sdpa")
    return model


def _answer_recipe(ground: Ground, recipe: Recipe) -> DistillRecipe:
    return DistillRecipe(
        max_new_tokens=min(recipe.answer_tokens, ground.length // 2),
        temperatures=(recipe.temperature,),
        rows=16 if ground.device.type == "cpu" else 64,
        seed=recipe.seed,
    )


def _distill(
    ground: Ground,
    conversations: list[Conversation],
    recipe: Recipe,
    work: Path,
    team: Team,
) -> Iterator[Event]:
    """The first process of a team answers; the others wait for as long as it takes."""
    while not team.is_first and not (work / ANSWERS_DONE).exists():
        time.sleep(1.0)
    if team.is_first:
        asked = _answer_recipe(ground, recipe)
        yield from answer_conversations(
            ground.model, ground.tokenizer, conversations, asked, ground.length, work / "answers"
        )
        (work / ANSWERS_DONE).touch()


def _answers(
    ground: Ground, conversations: list[Conversation], recipe: Recipe, work: Path
) -> Encoded:
    """All answers, read from their files."""
    events = answer_conversations(
        ground.model,
        ground.tokenizer,
        conversations,
        _answer_recipe(ground, recipe),
        ground.length,
        work / "answers",
    )
    found = tuple(event.example for event in events if event.example is not None)
    if not found:
        raise UsageError("the backbone answers every prompt with nothing: heads cannot learn that")
    return Encoded(found, 0, 0)


def head_recipe(recipe: Recipe, examples: Sequence[Example], ground: Ground) -> HeadRecipe:
    """The recipe in steps. The hidden states are kept where there is room and a second epoch."""
    rate = recipe.head_learning_rate
    width = ground.config.get_text_config().hidden_size * (2 if ground.precision != "fp32" else 4)
    labels = sum(sum(example.is_label) for example in examples)
    room = CACHE_BYTES.get(ground.device.type, 0)
    first = HeadRecipe(
        batch_tokens=recipe.batch_tokens,
        batch_labels=max(recipe.batch_tokens // 4, 1),
        cache_hidden=recipe.method == "medusa-1" and recipe.epochs > 1 and labels * width <= room,
        learning_rate=rate,
        other_learning_rate=rate / 10,
        warmup_steps=recipe.warmup_steps,
        decay=recipe.decay,
        weight_decay=recipe.weight_decay,
        seed=recipe.seed,
        optimizer=recipe.optimizer,
        sequence_length=min(ground.length, recipe.batch_tokens) if ground.packs else 0,
    )
    steps = recipe.max_steps or recipe.epochs * steps_an_epoch(first, examples, labels)
    often = max(steps // 10, 1)
    warmup = min(recipe.warmup_steps, steps // 4)
    return replace(
        first, steps=steps, warmup_steps=warmup, evaluate_every=often, save_every=min(often, 100)
    )


def steps_an_epoch(recipe: HeadRecipe, examples: Sequence[Example], labels: int) -> int:
    """Batches of an epoch; of kept hidden states there are about as many as labels."""
    if recipe.cache_hidden:
        return max(labels // recipe.batch_labels, 1)
    return len(epoch_of(examples, recipe, 0))


def joint_recipe(recipe: Recipe, heads: HeadRecipe) -> JointRecipe:
    return JointRecipe(
        heads=replace(heads, cache_hidden=False),
        learning_rate=recipe.learning_rate,
        lambda0=recipe.lambda0,
        schedule=recipe.lambda0_schedule,
        distill=recipe.distill,
        rank=recipe.lora_rank,
        alpha=recipe.lora_alpha,
        dropout=recipe.lora_dropout,
    )


def _train(
    request: TrainRequest,
    ground: Ground,
    conversations: list[Conversation],
    encoded: Encoded | None,
    work: Path,
    team: Team,
) -> Iterator[Event]:
    assert encoded is not None
    recipe, model = request.recipe, ground.model
    learnt, held_out = split(encoded.examples, recipe.seed)
    torch.manual_seed(recipe.seed)
    linear = model.get_output_embeddings()
    heads = new_heads(linear, recipe.heads, recipe.head_layers, recipe.own_lm_head)
    steps = head_recipe(recipe, learnt, ground)
    if team.size > 1 and steps.cache_hidden:
        ground.notes.append("hidden states are not kept: several processes stream the data")
    if recipe.method == "medusa-2":
        yield from _plan(request, ground, encoded, heads, learnt, held_out, steps)
        if recipe.stages == 2:
            yield Stage("heads alone")
            yield from train_heads(
                model, ground.lm_head, heads, learnt, steps, held_out, work / "heads.pt", team
            )
        yield Stage("backbone and heads")
        joint = joint_recipe(recipe, steps)
        wrapped, names = add_adapter(model, joint)
        yield from train_jointly(wrapped, heads, learnt, joint, held_out, work / "joint.pt", team)
        tensors = adapter_tensors(wrapped)
        wrapped.eval()
    else:
        yield from _plan(request, ground, encoded, heads, learnt, held_out, steps)
        yield Stage("heads")
        state = work / "heads.pt"
        yield from train_heads(model, ground.lm_head, heads, learnt, steps, held_out, state, team)
        tensors, names = {}, ()
    if not team.is_first:
        return
    yield Stage("calibration")
    calibrated = calibrate_heads(ground, heads, conversations, held_out, recipe, work)
    yield calibrated
    size = _write(request, ground, heads, calibrated, tensors, names)
    shutil.rmtree(work, ignore_errors=True)
    yield Written(str(request.output), size)


def _plan(
    request: TrainRequest,
    ground: Ground,
    encoded: Encoded,
    heads: MedusaHeads,
    learnt: Sequence[Example],
    held_out: Sequence[Example],
    steps: HeadRecipe,
) -> Iterator[Plan]:
    """Refuses where the disk is too full. Raises UsageError."""
    recipe, model = request.recipe, ground.model
    joint = recipe.method == "medusa-2"
    notes = list(ground.notes)
    if recipe.distill and joint and ground.precision in ("nf4", "int8"):
        raise UsageError(
            f"the teacher would be a backbone at {ground.precision}: distil at bf16, or leave "
            "--distill out"
        )
    if joint and is_tied(model):
        notes.append("the LM head is tied to the embeddings: the adapter leaves both alone")
    forward, learn = batch_seconds(model, ground.lm_head, heads, learnt, steps)
    each = 3 * forward + learn if joint else learn if steps.cache_hidden else forward + learn
    once = len(epoch_of(learnt, steps, 0)) * forward if steps.cache_hidden else 0.0
    first = (forward + learn) * steps.steps if joint and recipe.stages == 2 else 0.0
    adapter = _adapter_size(model, recipe.lora_rank) if joint else 0
    labels = sum(sum(example.is_label) for example in learnt)
    width = ground.config.get_text_config().hidden_size * model.dtype.itemsize
    cached = labels * width if steps.cache_hidden else 0
    needed = disk_bytes(model, heads, adapter, joint and recipe.output == "merged")
    yield Plan(
        backbone=request.backbone,
        method=recipe.method,
        recipe=recipe.name,
        device=str(ground.device),
        precision=ground.precision,
        rows=len(learnt),
        held_out=len(held_out),
        tokens=encoded.tokens,
        labels=encoded.labels,
        steps=steps.steps * (2 if joint and recipe.stages == 2 else 1),
        seconds=once + each * steps.steps + first,
        memory_bytes=memory_bytes(model, heads, steps, adapter, cached),
        disk_bytes=needed,
        free_bytes=require_room(request.output.resolve().parent, needed),
        notes=tuple(notes),
    )


def _adapter_size(model: Any, rank: int) -> int:
    """Values of an adapter on every matrix of the layers."""
    shapes = [p.shape for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    return rank * sum(sum(shape) for shape in shapes)


def calibrate_heads(
    ground: Ground,
    heads: MedusaHeads,
    conversations: list[Conversation],
    held_out: Sequence[Example],
    recipe: Recipe,
    work: Path,
) -> Calibrated:
    """Rank accuracies on greedy answers to the held-out rows' prompts, as decoding meets them; on
    the rows themselves where those are plain text."""
    places = {example.place for example in held_out}
    asked = [found for found in conversations if found.place in places and found.asked]
    measured, what = list(held_out), f"{len(held_out)} held-out rows"
    if asked and all(found.messages for found in conversations):
        greedy = DistillRecipe(
            max_new_tokens=min(CALIBRATION_TOKENS, ground.length // 2),
            temperatures=(0.0,),
            rows=16,
        )
        events = answer_conversations(
            ground.model, ground.tokenizer, asked, greedy, ground.length, work / "calibration"
        )
        answers = [event.example for event in events if event.example is not None]
        if answers:
            measured = answers
            what = f"{len(answers)} greedy answers of the backbone to held-out prompts"
    ranks = min(10, int(ground.config.get_text_config().vocab_size))
    *_, counts = count_ranks(ground.model, heads, measured, ranks, lm_head=ground.lm_head)
    return Calibrated.search(counts.accuracies, TREE_NODES, what, counts.labels[0])


def _write(
    request: TrainRequest,
    ground: Ground,
    heads: MedusaHeads,
    calibrated: Calibrated,
    tensors: dict[str, torch.Tensor],
    names: Sequence[str],
) -> int:
    recipe, output = request.recipe, request.output
    base = ground.base.seen_from(output)
    dtype = ground.model.dtype
    heads = heads.to(dtype).requires_grad_(False)
    is_merged = recipe.method == "medusa-2" and recipe.output == "merged"
    if is_merged:
        ground.model = None  # its memory is needed for the one that is merged into

    def fill(folder: Path) -> None:
        if is_merged:
            _merge(ground, folder, tensors, names, recipe, base)
        else:
            write_json(folder / "config.json", heads_config(heads, base))
            if tensors:
                write_adapter(folder, tensors, names, recipe, base)
        write_heads(folder, heads, calibrated)
        files = [path.name for path in request.data]
        card = model_card(ground.base, recipe, files, calibrated)
        (folder / "README.md").write_text(card, "utf-8")

    return write_checkpoint(output, fill)


def _merge(
    ground: Ground,
    folder: Path,
    tensors: dict[str, torch.Tensor],
    names: Sequence[str],
    recipe: Recipe,
    base: str,
) -> None:
    """Write the whole model: the adapter goes into the weights as they were published, in 16 bit,
    also where it was learnt over quantised ones."""
    file = write_adapter(folder, tensors, names, recipe, base)
    precision = "bf16" if ground.precision in ("nf4", "int8") else ground.precision
    model = weights.read_model(ground.found, ground.config, precision, torch.device("cpu"))
    merge_adapter(model, file).save_pretrained(folder)
    ground.tokenizer.save_pretrained(folder)
    file.unlink()
    file.with_name("adapter_config.json").unlink()


class _fitting:
    """Turns out of memory into a refusal that says which smaller setting to try."""

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name, self.recipe = name, recipe

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            smaller = max(self.recipe.batch_tokens // 2, 16)
            raise OutOfMemoryError(
                f"training heads for {self.name} does not fit: try --batch-tokens {smaller}, "
                "--precision nf4, or a shorter --sequence-length"
            ) from error
