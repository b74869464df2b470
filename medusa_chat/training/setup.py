"""TrainingSetup: the backbone that is trained on, and how it is run."""

import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from medusa_chat.checkpoints import devices, weights
from medusa_chat.checkpoints.fetch import fetch
from medusa_chat.checkpoints.gguf_backbone import converted
from medusa_chat.checkpoints.locate import Checkpoint, News
from medusa_chat.checkpoints.tokenizer import read_tokenizer
from medusa_chat.checkpoints.tokenizer_trial import TokenizerTrial
from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.families import needs_eager
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.checkpoint_writer import Base
from medusa_chat.training.events import Stage
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import Recipe, TrainRequest


@dataclass
class TrainingSetup:
    """The backbone of a training. length: most tokens of an example. notes: what was decided, for
    the plan. model: None until it is read."""

    base: Base
    found: Checkpoint
    config: Any
    tokenizer: Any
    device: torch.device
    precision: str
    length: int
    notes: list[str]
    model: Any = None

    @property
    def vocabulary(self) -> int:
        """Tokens that the backbone has logits for."""
        return int(self.config.get_text_config().vocab_size)

    @property
    def lm_head(self) -> LogitHead:
        """The backbone's output layer: hidden [..., d] -> logits [..., V]."""
        return LogitHead(self.model.get_output_embeddings(), self.config.get_text_config())


def prepare_setup(
    request: TrainRequest, group: ProcessGroup
) -> Generator[Stage, None, TrainingSetup]:
    """Everything about the backbone but its weights; a stage where it is downloaded, and where its
    file is converted first. Raises ModelError, DeviceError, UsageError."""
    found = yield from _told(fetch(LoadRequest(request.backbone, offline=request.offline)))
    _refuse_heads(request, found)
    config = weights.config_of(found)
    device = devices.choose_device(_device_name(request.device, group))
    precision, reason = devices.choose_precision(request.precision, device)
    place = found.source
    found = yield from _told(converted(found, precision))
    with closing(TokenizerTrial(found.backbone)) as trial:
        trial.refuse()
    tokenizer = read_tokenizer(found.backbone)
    _require_teacher(request.recipe, precision)
    length = _sequence_length(request, config.get_text_config())
    base = Base(found.repo or request.backbone, None if found.repo else place)
    return TrainingSetup(base, found, config, tokenizer, device, precision, length, [reason])


def _told(steps: Generator[News, None, Checkpoint]) -> Generator[Stage, None, Checkpoint]:
    """The backbone that fetching or converting it brings; what takes time and disk is told
    before."""
    told = ""
    while True:
        try:
            phase, _ = next(steps)
        except StopIteration as end:
            return end.value
        what = phase.note or f"{phase.name}ing the backbone"
        if what != told:
            told = what
            yield Stage(told)


def _refuse_heads(request: TrainRequest, found: Checkpoint) -> None:
    if found.adapter is not None or (found.heads is not None and found.heads.is_whole):
        raise ModelError(
            f"{request.backbone} has Medusa heads already: give its backbone as --backbone"
        )


def _device_name(name: str, group: ProcessGroup) -> str:
    """The device of this process: one GPU for each of several."""
    if group.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return name


def _require_teacher(recipe: Recipe, precision: str) -> None:
    """Refuse a quantised backbone as the teacher of itself."""
    if recipe.distill and recipe.method == "medusa-2" and precision in ("nf4", "int8"):
        raise UsageError(
            f"--distill with medusa-2 needs a teacher that is not quantised, and --precision is "
            f"{precision}: use bf16, or omit --distill"
        )


def _sequence_length(request: TrainRequest, text: Any) -> int:
    """Tokens of an example at most: what was asked for, or the recipe's within the context."""
    recipe_length = request.recipe.sequence_length
    context = int(getattr(text, "max_position_embeddings", None) or recipe_length)
    length = request.sequence_length or min(recipe_length, context)
    if length > context:
        raise UsageError(
            f"--sequence-length is {length}, but the backbone's context is {context}: give at most "
            f"{context}"
        )
    return length


def read_model(setup: TrainingSetup) -> Any:
    """The frozen backbone with the fastest attention of its family."""
    model = weights.read_model(setup.found, setup.config, setup.precision, setup.device)
    if not needs_eager(model):
        model.set_attn_implementation("sdpa")
    return model
