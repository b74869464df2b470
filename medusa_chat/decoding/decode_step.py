"""StepRunner: runs the steps of an answer, in one call where the backbone's WholeStep can, else by
operators."""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from medusa_chat.decoding.acceptance import Rule, VerifyInput
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_result import DecodeState, StepResult, read
from medusa_chat.decoding.stopwatch import Stopwatch
from medusa_chat.decoding.tree import ROOT


class StepRunner:
    """Runs steps after the tokens in the backbone's cache and appends what they accept to it."""

    def __init__(self, backbone: Backbone) -> None:
        self._backbone, self._watch = backbone, Stopwatch(backbone.device)
        self._root_tensors = TreeTensors.of(ROOT, backbone.device)

    def decode_step(self, state: DecodeState, known: Sequence[int]) -> list[StepResult]:
        """One step, or several where WholeStep does so: plan, draft, backbone pass, acceptance.

        known: the tokens since the last call (first the prompt), the root last. Accepted rows are
        in the cache afterwards, and `state` describes the position after them.
        """
        cache, whole = self._backbone.cache, self._backbone.whole_step
        begun = perf_counter()
        room = self._backbone.context - 1 - cache.length
        plan = state.drafter.plan(known, room, state.certainty)
        planning = perf_counter() - begun
        outcomes = whole and whole.decode_steps(plan, known[-1], state)
        is_booked = plan.grower is not None
        if whole and outcomes:
            state.root, state.hidden = None, whole.hidden
        else:
            outcomes, is_booked = [self._by_parts(state, plan, known[-1])], False
        for outcome in outcomes:
            outcome.heads_seconds += planning / len(outcomes)
            if not is_booked:
                state.drafter.learn(outcome.nodes, outcome.path)
        state.certainty = outcomes[-1].certainty
        return outcomes

    @torch.inference_mode()
    def _by_parts(self, state: DecodeState, plan: Plan, root_id: int) -> StepResult:
        """One step by torch operators. `read` waits for the device, so the times between the marks
        are known after it."""
        cache, watch = self._backbone.cache, self._watch
        begun = watch.mark()
        if state.root is None:
            state.root = torch.tensor([root_id], device=self._backbone.device)
        draft = state.drafter.fill(plan, state.root, state.hidden)
        drafted = watch.mark()
        hidden, logits = self._backbone.run_draft(draft)
        verify_input = VerifyInput(draft, logits, cache.length, state.settings, state.details)
        ended = watch.mark()
        accepted = state.rule(verify_input, self._backbone.verifier)
        outcome = read(draft, accepted)
        if outcome.is_finite:
            if outcome.path == list(range(len(outcome.path))):
                cache.extend(len(outcome.path))  # the accepted rows are the first ones already
            else:
                cache.keep(accepted.path, len(outcome.path))
        if plan.least:
            last = logits[outcome.path[-1]]
            outcome.certainty = self._certainty(last, outcome, state.settings, plan.least)
        state.root, state.hidden = accepted.next_token, hidden.index_select(0, accepted.node)
        outcome.heads_seconds = watch.between(begun, drafted)
        outcome.backbone_seconds = watch.between(drafted, ended)
        return outcome

    def after(
        self,
        token: int,
        hidden: Tensor,
        position: int,
        rule: Rule,
        settings: GenerationSettings,
        least: float,
    ) -> StepResult:
        """The token after the text, without a draft. token, position: the text's last; hidden [1,
        d]: its state. least: the certainty is reported from here on, 0: never."""
        root = torch.tensor([token], device=self._backbone.device)
        draft = Draft(root, ROOT, self._root_tensors)
        verify_input = VerifyInput(draft, self._backbone.lm_head(hidden), position, settings, False)
        outcome = read(draft, rule(verify_input, self._backbone.verifier))
        if least:
            outcome.certainty = self._certainty(verify_input.logits[0], outcome, settings, least)
        return outcome

    def _certainty(
        self, logits: Tensor, outcome: StepResult, settings: GenerationSettings, least: float
    ) -> float:
        """The backbone's certainty of the next token, by its logits [V]; 0 where under `least`."""
        found = self._backbone.verifier.certainty(logits, outcome.next_token, settings.scale)
        return found if found >= least else 0.0
