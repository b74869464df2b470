"""TeacherStates: what the stage of the heads alone has computed of the teacher of the joint one."""

import torch
from torch import Tensor

from medusa_chat.training.data import Batch
from medusa_chat.training.loss import IGNORED
from medusa_chat.training.recipe import Recipe

BYTES = {"cpu": 2_000_000_000, "cuda": 8_000_000_000}  # most memory of the states


class TeacherStates:
    """The backbone's hidden states before every label of a step's batch, kept until the joint stage
    takes them, in which the same step has the same batch. They are what the backbone without its
    adapter gives there, so that they save a pass at every step and change nothing. most: bytes that
    are kept; the states of later steps are computed anew."""

    def __init__(self, most: int) -> None:
        self._left = most
        self._states: dict[int, Tensor] = {}

    def keep(self, step: int, batch: Batch, hidden: Tensor) -> None:
        """Keep the hidden states [b, t, d] of the batch of a step."""
        chosen = hidden[(next_tokens(batch) != IGNORED).to(hidden.device)]
        self._left -= chosen.nbytes
        if self._left >= 0:
            self._states[step] = chosen

    def take(self, step: int) -> Tensor | None:
        """The states [n, d] of a step, which are kept no longer; None where they were not."""
        return self._states.pop(step, None)


def needs_teacher_twice(recipe: Recipe) -> bool:
    """Whether both stages of a training run the backbone without an adapter over their batches."""
    return recipe.method == "medusa-2" and recipe.stages == 2 and recipe.distill


def teacher_states(recipe: Recipe, device: torch.device) -> TeacherStates | None:
    """Empty ones, for a training that needs them."""
    return TeacherStates(BYTES.get(device.type, 0)) if needs_teacher_twice(recipe) else None


def next_tokens(batch: Batch) -> Tensor:
    """[b, t] int64: the next token where it is a label, otherwise IGNORED."""
    labels = torch.full_like(batch.ids, IGNORED)
    labels[:, :-1] = batch.ids[:, 1:].masked_fill(~batch.is_label[:, 1:], IGNORED)
    return labels
