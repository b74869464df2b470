"""TorchStep: one decoding step by torch's operators, on any device and for any model family."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Acceptance, VerifyInput
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters import Draft, Plan
from medusa_chat.decoding.sampling import Position, Rows
from medusa_chat.decoding.step_result import DecodeState, StepResult, read
from medusa_chat.decoding.stopwatch import Stopwatch

Pass = Callable[
    [Draft], tuple[Tensor, Tensor]
]  # a draft of n nodes -> hidden [n, d], logits [n, V]


def run_step(
    state: DecodeState,
    plan: Plan,
    root: Tensor,
    hidden: Tensor,
    position: Position,
    settings: Any,
    run: Pass,
    rows: Rows,
    mark: Callable[[], Any] = lambda: None,
) -> tuple[Draft, Acceptance, Tensor, list[Any]]:
    """The body of every step, which never waits for the device: draft, pass, acceptance -> those,
    the state [1, d] after the path, and `mark`s before the draft, after it and after the pass.

    root int64 [1] and hidden [1, d] on the device; position: of the root; settings: the state's,
    or what stands for them in a recording; rows: what reads the logits.
    """
    marks = [mark()]
    draft = state.drafter.fill(plan, root, hidden)
    marks.append(mark())
    states, logits = run(draft)
    marks.append(mark())
    accepted = state.rule(VerifyInput(draft, logits, position, settings, state.details, rows))
    return draft, accepted, states.index_select(0, accepted.node), marks


class TorchStep:
    """A StepBackend that waits for the device once a step, to read the result."""

    name, tries = "torch operators", 0

    def __init__(self, backbone: Backbone) -> None:
        self.backbone, self._watch = backbone, Stopwatch(backbone.device)
        self.rows, self.seconds = backbone.rows, 0.0

    @torch.inference_mode()
    def step(self, state: DecodeState, plan: Plan) -> StepResult:
        """See StepBackend."""
        cache, watch = self.backbone.cache, self._watch
        root = state.root
        if root is None:
            root = torch.tensor([state.root_id], device=self.backbone.device)
        draft, accepted, hidden, marks = run_step(
            *(state, plan, root, state.hidden, cache.length, state.settings, self.run),
            *(self.rows, watch.mark),
        )
        outcome = read(draft, accepted)
        if outcome.is_finite:
            if outcome.path == list(range(len(outcome.path))):
                cache.extend(len(outcome.path))  # the accepted rows are the first ones already
            else:
                cache.keep(accepted.path, len(outcome.path))
        state.root, state.root_id = accepted.next_token, outcome.next_token
        state.hidden = hidden
        outcome.heads_seconds = watch.between(marks[0], marks[1])
        outcome.backbone_seconds = watch.between(marks[1], marks[2])
        self.seconds += outcome.heads_seconds + outcome.backbone_seconds
        return outcome

    def run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass: see Pass."""
        return self.backbone.run_draft(draft)
