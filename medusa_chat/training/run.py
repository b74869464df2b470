"""`medusa-chat train`, from the request to the checkpoint, as typed events."""

import errno
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from medusa_chat.errors import MedusaChatError, OutOfMemoryError, UsageError
from medusa_chat.training.checkpoint_writer import Calibrated
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.data import Example
from medusa_chat.training.distill_conversations import Answered
from medusa_chat.training.distill_stage import distill, keep_answers
from medusa_chat.training.events import Evaluated, HiddenStates, Stage, TrainStep, Written
from medusa_chat.training.examples import encode_all, require_template, split
from medusa_chat.training.head_calibration import calibrate_heads
from medusa_chat.training.joint import train_jointly
from medusa_chat.training.lora import adapter_tensors, add_adapter
from medusa_chat.training.plan import Plan, plan
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import TrainRequest
from medusa_chat.training.setup import TrainingSetup, prepare_setup, read_model
from medusa_chat.training.short_vocabulary import learnt_vocabulary, shortlist
from medusa_chat.training.stage_recipes import head_recipe, joint_recipe
from medusa_chat.training.trainer import new_heads, train_heads
from medusa_chat.training.training_output import Adapter, write_output
from medusa_chat.training.work_folder import begun, work_folder

Event = Stage | Plan | Answered | HiddenStates | TrainStep | Evaluated | Calibrated | Written


def train(request: TrainRequest, group: ProcessGroup = ALONE) -> Iterator[Event]:
    """Close the generator to stop: what is done stays on the disk, and a request with `resume`
    continues there. Raises MedusaChatError; what can be checked without the backbone's weights is
    checked first."""
    folder = work_folder(request.output)
    with _advice(request), begun(request, folder) if group.is_first else nullcontext():
        yield from _from_setup(request, group, folder)


def _from_setup(request: TrainRequest, group: ProcessGroup, folder: Path) -> Iterator[Event]:
    recipe = request.recipe
    setup = yield from prepare_setup(request, group)
    conversations = _read(request.data, recipe.distill, setup.notes)
    if recipe.distill:
        require_template(setup.tokenizer, conversations)
        setup.model = read_model(setup)
        examples = yield from distill(setup, conversations, recipe, folder, group)
    else:
        examples = _encode(setup, conversations)
        setup.model = read_model(setup)
    yield from _train(request, setup, conversations, examples, folder, group)


def _read(paths: Sequence[Path], prompts: bool, notes: list[str]) -> list[Conversation]:
    """The conversations of all files. notes: gets what was left out of them."""
    files = [read_conversations(path, prompts) for path in paths]
    notes += (note for file in files for note in file.notes)
    found = [one for file in files for one in file.conversations]
    if not found:
        raise UsageError(f"{', '.join(map(str, paths))} holds no conversation: give other --data")
    return found


def _encode(setup: TrainingSetup, conversations: list[Conversation]) -> Sequence[Example]:
    """The conversations as they stand in the data."""
    encoded = encode_all(setup.tokenizer, conversations, setup.length, setup.vocabulary)
    setup.notes += [encoded.note] if encoded.note else []
    if encoded.cut:
        setup.notes.append(f"{encoded.cut} rows are cut to {setup.length} tokens")
    if encoded.left_out:
        setup.notes.append(
            f"{encoded.left_out} rows are skipped: no answer of two tokens begins within "
            f"{setup.length}"
        )
    return encoded.examples


def _train(
    request: TrainRequest,
    setup: TrainingSetup,
    conversations: list[Conversation],
    found: Sequence[Example],
    folder: Path,
    group: ProcessGroup,
) -> Iterator[Event]:
    """Plan, train the stages of the recipe, calibrate and write the checkpoint."""
    recipe = request.recipe
    examples, held_out = split(found, recipe.seed)
    torch.manual_seed(recipe.seed)
    lm_head = setup.model.get_output_embeddings()
    embedding = setup.model.get_input_embeddings() if recipe.root else None
    heads = new_heads(lm_head, recipe.heads, recipe.head_layers, recipe.own_lm_head, embedding)
    stage = head_recipe(recipe, examples, setup)
    if group.size > 1 and stage.cache_hidden:
        setup.notes.append("hidden states are not cached: several processes stream the data")
    tokens = shortlist((example.labels for example in examples), setup.vocabulary)
    short = learnt_vocabulary(setup, recipe, tokens)
    yield plan(request, setup, heads, examples, held_out, stage)
    if recipe.method == "medusa-1" or recipe.stages == 2:
        yield Stage("heads alone")
        alone = stage, held_out, folder / "heads.pt", group, None, short
        yield from train_heads(setup.model, setup.lm_head, heads, examples, *alone)
    adapter = Adapter()
    if recipe.method == "medusa-2":
        yield Stage("backbone and heads")
        joint = joint_recipe(recipe, stage)
        wrapped, layers = add_adapter(setup.model, joint)
        settings = held_out, folder / "joint.pt", group, short
        yield from train_jointly(wrapped, heads, examples, joint, *settings)
        adapter = Adapter(adapter_tensors(wrapped), layers)
        wrapped.eval()
        del wrapped  # the merge reads the backbone again, into the memory of this one
    if not group.is_first:
        return
    yield Stage("calibration")
    calibrated = calibrate_heads(setup, heads, conversations, held_out, folder, tokens)
    calibrated = replace(calibrated, shortlist=tokens)
    yield calibrated
    size = write_output(request, setup, heads, calibrated, adapter)
    answers = keep_answers(folder, request.output)
    shutil.rmtree(folder, ignore_errors=True)
    yield Written(str(request.output), size, "" if answers is None else str(answers))


@contextmanager
def _advice(request: TrainRequest) -> Iterator[None]:
    """Turns a lack of memory or of disk space into an error that says what to try."""
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
            f"the disk of {request.output} is full: free some space, then add --resume"
        ) from error
