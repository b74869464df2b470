"""`medusa-chat train`, from the request to the checkpoint, as typed events."""

import errno
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from medusa_chat.errors import MedusaChatError, OutOfMemoryError, UsageError
from medusa_chat.training.answerers import Answerer, answerer, require_ends
from medusa_chat.training.checkpoint_writer import Calibrated
from medusa_chat.training.conversations import Conversation, read_conversations
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.distill_conversations import Answered, answer_conversations
from medusa_chat.training.examples import EncodedExamples, encode_all, require_template, split
from medusa_chat.training.head_calibration import calibrate_heads, write_output
from medusa_chat.training.joint import adapter_tensors, add_adapter, train_jointly
from medusa_chat.training.plan import Plan, plan
from medusa_chat.training.process_group import ALONE, ProcessGroup
from medusa_chat.training.recipe import Recipe, TrainRequest
from medusa_chat.training.resolve_recipe import head_recipe, joint_recipe
from medusa_chat.training.resume_state import begin_training, work_folder
from medusa_chat.training.setup import TrainingSetup, prepare_setup, read_model
from medusa_chat.training.shortlist import shortlist
from medusa_chat.training.trainer import Evaluated, TrainStep, new_heads, train_heads

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


def train(request: TrainRequest, group: ProcessGroup = ALONE) -> Iterator[Event]:
    """Close the generator to stop: what was done is kept, and `resume` goes on there. Raises
    MedusaChatError in one line, what can be known before a model is loaded first."""
    recipe = request.recipe
    work = work_folder(request.output)
    if group.is_first:
        begin_training(request, work)
    setup = prepare_setup(request, group)
    conversations = _read(request.data, recipe.distill)
    encoded = _encode(setup, conversations, recipe)
    with _fitting(request):
        setup.model = read_model(setup)
        if recipe.distill:
            asked = sum(len(found.asked) + recipe.self_talk for found in conversations)
            most = _answer_recipe(setup, recipe).max_new_tokens
            yield Stage(f"answering {asked:,} questions, at most {most} tokens each")
            yield from _distill(setup, conversations, recipe, work, group)
            encoded = _answers(setup, conversations, recipe, work)
        yield from _train(request, setup, conversations, encoded, work, group)


def _read(paths: Sequence[Path], prompts: bool) -> list[Conversation]:
    found = [one for path in paths for one in read_conversations(path, prompts)]
    if not found:
        names = ", ".join(str(path) for path in paths)
        raise UsageError(f"{names} holds no conversation: the data is empty")
    return found


def _encode(
    setup: TrainingSetup, conversations: list[Conversation], recipe: Recipe
) -> EncodedExamples | None:
    """None where the backbone answers itself."""
    if recipe.distill:
        require_template(setup.tokenizer, conversations)
        return None
    vocabulary = int(setup.config.get_text_config().vocab_size)
    encoded = encode_all(setup.tokenizer, conversations, setup.length, vocabulary)
    if encoded.cut:
        setup.notes.append(f"{encoded.cut} rows are cut to {setup.length} tokens")
    if encoded.left_out:
        setup.notes.append(f"{encoded.left_out} rows are left out: no answer begins within that")
    return encoded


def _answer_recipe(setup: TrainingSetup, recipe: Recipe) -> DistillRecipe:
    return DistillRecipe(
        max_new_tokens=min(recipe.answer_tokens, setup.length // 2),
        temperatures=(recipe.temperature,),
        rows=16 if setup.device.type == "cpu" else 64,
        seed=recipe.seed,
    )


def _distill(
    setup: TrainingSetup,
    conversations: list[Conversation],
    recipe: Recipe,
    work: Path,
    group: ProcessGroup,
) -> Iterator[Event]:
    """The first process of a team answers; the others wait for as long as it takes."""
    while not group.is_first and not (work / ANSWERS_DONE).exists():
        time.sleep(1.0)
    if group.is_first:
        asked = _answer_recipe(setup, recipe)
        yield from answer_conversations(
            _answerer(setup),
            setup.tokenizer,
            conversations,
            asked,
            setup.length,
            work / "answers",
            recipe.self_talk,
        )
        (work / ANSWERS_DONE).touch()


def _answerer(setup: TrainingSetup) -> Answerer:
    ends = require_ends(setup.model, setup.tokenizer)
    return answerer(setup.model, setup.length, ends)


def _answers(
    setup: TrainingSetup, conversations: list[Conversation], recipe: Recipe, work: Path
) -> EncodedExamples:
    """All answers, read from their files."""
    events = answer_conversations(
        _answerer(setup),
        setup.tokenizer,
        conversations,
        _answer_recipe(setup, recipe),
        setup.length,
        work / "answers",
        recipe.self_talk,
    )
    found = tuple(event.example for event in events if event.example is not None)
    if not found:
        raise UsageError("the backbone answers every prompt with nothing: heads cannot learn that")
    return EncodedExamples(found, 0, 0)


def _train(
    request: TrainRequest,
    setup: TrainingSetup,
    conversations: list[Conversation],
    encoded: EncodedExamples | None,
    work: Path,
    group: ProcessGroup,
) -> Iterator[Event]:
    assert encoded is not None
    recipe, model = request.recipe, setup.model
    learnt, held_out = split(encoded.examples, recipe.seed)
    torch.manual_seed(recipe.seed)
    linear = model.get_output_embeddings()
    heads = new_heads(linear, recipe.heads, recipe.head_layers, recipe.own_lm_head)
    steps = head_recipe(recipe, learnt, setup)
    if group.size > 1 and steps.cache_hidden:
        setup.notes.append("hidden states are not kept: several processes stream the data")
    yield plan(request, setup, heads, learnt, held_out, steps)
    if recipe.method == "medusa-1" or recipe.stages == 2:
        yield Stage("heads alone")
        state = work / "heads.pt"
        yield from train_heads(model, setup.lm_head, heads, learnt, steps, held_out, state, group)
    tensors, names = {}, ()
    if recipe.method == "medusa-2":
        yield Stage("backbone and heads")
        joint = joint_recipe(recipe, steps)
        wrapped, names = add_adapter(model, joint)
        yield from train_jointly(wrapped, heads, learnt, joint, held_out, work / "joint.pt", group)
        tensors = adapter_tensors(wrapped)
        wrapped.eval()
        del wrapped  # the merge below reads the backbone again, into the memory of this one
    del model, linear
    if not group.is_first:
        return
    yield Stage("calibration")
    calibrated = calibrate_heads(setup, heads, conversations, held_out, recipe, work)
    if heads.is_shared:
        vocabulary = int(setup.config.get_text_config().vocab_size)
        said = shortlist((one.labels for one in learnt), vocabulary)
        calibrated = replace(calibrated, shortlist=said)
    yield calibrated
    size = write_output(request, setup, heads, calibrated, tensors, names)
    shutil.rmtree(work, ignore_errors=True)
    yield Written(str(request.output), size)


class _fitting:
    """A context manager: no memory or no disk left becomes a refusal that says what to try."""

    def __init__(self, request: TrainRequest) -> None:
        self.request = request

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            smaller = max(self.request.recipe.batch_tokens // 2, 16)
            raise OutOfMemoryError(
                f"training heads for {self.request.backbone} does not fit: try --batch-tokens "
                f"{smaller}, --precision nf4, or a shorter --sequence-length"
            ) from error
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise MedusaChatError(
                f"the disk of {self.request.output} is full: make room, then add --resume"
            ) from error
