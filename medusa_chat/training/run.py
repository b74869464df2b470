"""`medusa-chat train`, from the request to the checkpoint, as typed events.

The state of an unfinished training is in a work folder beside its output.
"""

import errno
import hashlib
import json
import shutil
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from medusa_chat import paths
from medusa_chat.errors import MedusaChatError, OutOfMemoryError, UsageError
from medusa_chat.training.calibration import calibrate_heads
from medusa_chat.training.checkpoint_writer import Adapter, write_checkpoint
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.distill import Answered, distill, keep_answers
from medusa_chat.training.events import Evaluated, HiddenStates, Note, Stage, TrainStep, Written
from medusa_chat.training.examples import Example, encode_all, require_template, split
from medusa_chat.training.joint import add_adapter, train_jointly
from medusa_chat.training.loss import shortlist
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import Plan, TrainingSetup, plan, prepare_setup, resolved
from medusa_chat.training.trainer import INPUTS, adapter_tensors, new_heads, train_heads
from medusa_chat.trees.calibration import Calibration

REQUEST = "request.json"
LOCK = "lock"
Event = (
    Stage | Note | Plan | Answered | HiddenStates | TrainStep | Evaluated | Calibration | Written
)


def train(request: TrainRequest, group: ProcessGroup = ALONE) -> Generator[Event, None, None]:
    """Train to the written checkpoint. Close the generator to stop: the work so far stays on disk,
    and a request with `resume` continues from it. Raises MedusaChatError; everything that can be
    checked without the backbone's weights is checked first."""
    folder = work_folder(request.output)
    with _advice(request), _locked(request, folder) if group.is_first else nullcontext():
        yield from _from_setup(request, group, folder)


def _from_setup(request: TrainRequest, group: ProcessGroup, folder: Path) -> Iterator[Event]:
    recipe = request.recipe
    setup = yield from prepare_setup(request, group)
    conversations = _read(request.data, recipe.distill, setup.notes)
    if recipe.distill:
        require_template(setup.tokenizer, conversations)
        setup.read_model()
        examples = yield from distill(setup, conversations, recipe, folder, group)
    else:
        examples = _encode(setup, conversations)
        setup.read_model()
    yield from _train(request, setup, conversations, examples, folder, group)


def _read(data: Sequence[Path], prompts: bool, notes: list[str]) -> list[Conversation]:
    """The conversations of all files. notes: what was left out is appended."""
    files = [read_conversations(path, prompts) for path in data]
    notes += (note for file in files for note in file.notes)
    conversations = [one for file in files for one in file.conversations]
    if not conversations:
        raise UsageError(f"{', '.join(map(str, data))} has no conversation: give other --data")
    return conversations


def _encode(setup: TrainingSetup, conversations: list[Conversation]) -> list[Example]:
    """The conversations of the data as examples, with the answers in it."""
    encoded = encode_all(setup.tokenizer, conversations, setup.length, setup.vocabulary)
    setup.notes += encoded.notes
    return list(encoded.examples)


def _train(
    request: TrainRequest,
    setup: TrainingSetup,
    conversations: list[Conversation],
    encoded: Sequence[Example],
    folder: Path,
    group: ProcessGroup,
) -> Iterator[Event]:
    """Plan, train the stages of the recipe, calibrate and write the checkpoint."""
    recipe = request.recipe
    examples, held_out = split(encoded, recipe.seed)
    torch.manual_seed(recipe.seed)
    lm_head = setup.model.get_output_embeddings()
    embedding = setup.model.get_input_embeddings() if recipe.root else None
    heads = new_heads(lm_head, recipe.heads, recipe.head_layers, recipe.own_lm_head, embedding)
    recipe = resolved(recipe, examples, setup)
    if group.size > 1 and recipe.cache:
        setup.notes.append("hidden states are not cached: several processes stream the data")
    tokens = shortlist((example.labels for example in examples), setup.vocabulary)
    short = setup.short_vocabulary(recipe, tokens)
    has_inputs = (folder / INPUTS).exists()
    yield plan(request, recipe, setup, heads, examples, held_out, group, has_inputs)
    if recipe.method == "medusa-1" or recipe.stages == 2:
        yield Stage("heads alone")
        file = folder / "heads.pt"
        yield from train_heads(
            setup.model, setup.lm_head, heads, examples, recipe, held_out, file, group, short=short
        )
    adapter = Adapter()
    if recipe.method == "medusa-2":
        yield Stage("backbone and heads")
        wrapped, layers = add_adapter(setup.model, recipe)
        file = folder / "joint.pt"
        yield from train_jointly(wrapped, heads, examples, recipe, held_out, file, group, short)
        adapter = Adapter(adapter_tensors(wrapped), layers)
        wrapped.eval()
        del wrapped  # the merge reads the backbone again, into the memory of this one
    if not group.is_first:
        return
    yield Stage("calibration")
    measured = yield from calibrate_heads(setup, heads, conversations, held_out, folder, tokens)
    calibration = replace(measured, shortlist=tokens)
    yield calibration
    size = write_checkpoint(request, setup, heads, calibration, adapter)
    answers = keep_answers(folder, request.output)
    shutil.rmtree(folder, ignore_errors=True)
    yield Written(str(request.output), size, "" if answers is None else str(answers))


@contextmanager
def _advice(request: TrainRequest) -> Iterator[None]:
    """Turn a lack of memory or disk space into an error that says what to try."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        smaller = max(request.recipe.batch_tokens // 2, 16)
        raise OutOfMemoryError(
            f"training heads for {request.backbone} does not fit in memory: try --batch-tokens "
            f"{smaller}, --precision nf4, or a shorter --sequence-length"
        ) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise MedusaChatError(
            f"the disk of {request.output} is full: free some space and start again, with "
            "--resume if the training had begun"
        ) from error


# --------------------------------------------------------------------------------- the work folder


def work_folder(output: Path) -> Path:
    """The folder with the state of an unfinished training."""
    return output.with_name(f"{output.name}.training")


@contextmanager
def _locked(request: TrainRequest, folder: Path) -> Iterator[None]:
    """Lock the work folder and write the request into it. After an error the folder stays if
    any work was done. Raises UsageError where the output exists, where another training uses the
    folder, and where --resume, the folder and its request do not fit together."""
    output = request.output
    if output.exists():
        raise UsageError(f"{output} exists: give another --output, or move it away")
    if not output.resolve().parent.is_dir():
        raise UsageError(f"{output} cannot be written: create its parent folder first")
    if not paths.can_write(output.resolve().parent):
        raise UsageError(f"{output} cannot be written: you may not write in its parent folder")
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give another --output, or move it away")
    if request.resume and not folder.exists():
        raise UsageError(f"there is nothing to resume at {folder}: omit --resume")
    folder.mkdir(exist_ok=True)
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise UsageError(f"{folder} is in use by a running training: stop that one first") from None
    try:
        _write_request(request, folder)
        yield
    except Exception:
        if not _holds_work(folder):
            shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        lock.release()


def _write_request(request: TrainRequest, folder: Path) -> None:
    if _holds_work(folder) and not request.resume:
        raise UsageError(f"{folder} holds an unfinished training: add --resume, or remove it")
    file = folder / REQUEST
    shown = _request_json(request)
    if file.exists() and request.resume:
        before = json.loads(file.read_text("utf-8"))
        for key, value in shown.items():
            if before.get(key) != value:
                what = "recipe" if key == "name" else key.removeprefix("explicit ")
                raise UsageError(
                    f"{folder} was started with another {what.replace('_', ' ')} "
                    f"({before.get(key)}, not {value}): give the same options and data, or remove "
                    "it"
                )
    paths.write_text(file, json.dumps(shown, indent=2) + "\n")


def _holds_work(folder: Path) -> bool:
    """Whether the folder has more than a request: work of a training, or files of someone else."""
    return any(file.name not in (REQUEST, LOCK) for file in folder.iterdir())


def _digest(path: Path) -> str:
    """A short hash of a file's content. Raises UsageError."""
    try:
        with open(path, "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None


def _request_json(request: TrainRequest) -> dict[str, Any]:
    """The values that must be the same when a training is resumed."""
    chosen = asdict(request.recipe)
    data = [f"{path.resolve()} ({_digest(path)})" for path in request.data]
    values = {"backbone": request.backbone, "precision": request.precision, "data": data}
    return values | {"explicit sequence_length": request.sequence_length} | chosen
