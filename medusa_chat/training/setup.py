"""TrainingSetup: the backbone that a training stands on, and how it is run."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from medusa_chat.checkpoints import devices, weights
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.decoding.backbone import LogitHead, needs_eager, windows
from medusa_chat.errors import ModelError, UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.training.checkpoint_writer import Base
from medusa_chat.training.process_group import ProcessGroup
from medusa_chat.training.recipe import TrainRequest


@dataclass
class TrainingSetup:
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


def prepare_setup(request: TrainRequest, group: ProcessGroup) -> TrainingSetup:
    """Everything of the backbone but its weights."""
    recipe = request.recipe
    found = Checkpoint.find(LoadRequest(request.backbone, offline=request.offline))
    if found.adapter is not None or (found.heads is not None and found.heads.is_whole):
        raise ModelError(f"{request.backbone} has Medusa heads already: give the backbone itself")
    config = weights.read_config(found.backbone)
    tokenizer = weights.read_tokenizer(found.backbone)
    name = request.device
    if group.size > 1 and name in ("auto", "cuda") and torch.cuda.is_available():
        name = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    device = devices.choose_device(name)
    precision, reason = devices.choose_precision(request.precision, device)
    if recipe.distill and recipe.method == "medusa-2" and precision in ("nf4", "int8"):
        raise UsageError(
            f"the teacher would be a backbone at {precision}: give --precision bf16, or leave "
            "--distill out"
        )
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
    return TrainingSetup(
        base, found, config, tokenizer, device, precision, length, not narrow, notes
    )


def read_model(setup: TrainingSetup) -> Any:
    """The frozen backbone, with the fastest attention that takes a mask of ours."""
    model = weights.read_model(setup.found, setup.config, setup.precision, setup.device)
    if not needs_eager(setup.config.get_text_config()):
        model.set_attn_implementation("sdpa")
    return model
