"""RecordedStep: a step of fixed shapes, which CUDA records once as a graph and replays."""

from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.backends.graph_capture import GraphCapture
from medusa_chat.decoding.draft import Draft, Plan
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import DecodeState, Frame, packed, row_at, run_step


class DeviceSettings:
    """The part of GenerationSettings that a rule reads, with numbers as tensors [] on the device,
    so that one graph serves all temperatures, thresholds and seeds. Greedy or not, top-k, top-p
    and min-p change the operators of a step and are constants of a graph."""

    def __init__(self, settings: GenerationSettings, device: torch.device) -> None:
        self.is_greedy, self.top_k, self.top_p, self.min_p = kind_of(settings)
        self._scale, self.posterior_threshold, self.posterior_alpha = torch.ones(3, device=device)
        self.seed = torch.zeros((), dtype=torch.long, device=device)

    @property
    def scale(self) -> Tensor | float:
        """GenerationSettings.scale as a float32 tensor [], or 1.0 where greedy."""
        return 1.0 if self.is_greedy else self._scale

    def follow(self, settings: GenerationSettings) -> None:
        """Take over settings of the same kind (`kind_of`)."""
        if self.is_greedy:
            return
        self._scale.fill_(settings.scale)
        self.posterior_threshold.fill_(settings.posterior_threshold)
        self.posterior_alpha.fill_(settings.posterior_alpha)
        self.seed.fill_(settings.seed or 0)


def kind_of(settings: GenerationSettings) -> tuple[bool, int, float, float]:
    """The settings that need a graph of their own: (is_greedy, top_k, top_p, min_p)."""
    if settings.is_greedy:
        return True, 0, 1.0, 0.0
    return False, settings.top_k, settings.top_p, settings.min_p


class RecordedStep:
    """Steps of one plan and one rule, for texts of at most `bucket` tokens with the plan's nodes.

    `body` never waits for the device, and every shape is fixed: on CUDA it is one graph, elsewhere
    it is called. An attention that takes node masks reads the text's own length; for any other one
    keys and values are read up to `bucket` and masked after the text.
    """

    out: Tensor  # the last step's words [w], see step.packed
    frame: Frame  # their layout

    def __init__(
        self,
        capture: GraphCapture,
        plan: Plan,
        state: DecodeState,
        settings: DeviceSettings,
        bucket: int,
    ) -> None:
        """plan: the root alone, or one that the drafter fills without waiting for the device."""
        self._backbone, self._state = capture.backbone, capture.state
        self._plan, self._answer = plan, state  # of its drafter, acceptance and details alone
        self._settings: Any = settings  # stands for GenerationSettings
        device = capture.backbone.device
        self._nodes = torch.arange(len(plan.tree), device=device)
        self._deep = torch.arange(plan.tree.depth + 1, device=device)
        self._masks = self._backbone.node_masks(plan.tensors)
        self._columns = torch.arange(bucket, device=device)
        self._places = torch.zeros_like(self._nodes)
        self._layers = self._backbone.cache.fixed(self._places, bucket)
        self._is_begun = False
        self.replay = capture.recorded(self.body)

    @torch.inference_mode()
    def body(self) -> None:
        """Queue draft, decoder, acceptance and the move of cache rows, without waiting."""
        state = self._state
        draft, taken, (root, hidden), _ = run_step(
            self._answer,
            self._plan,
            state.root,
            state.hidden,
            state.cur,
            self._settings,
            self._run,
            self._backbone.rows,
        )
        tensors = self._plan.tensors
        source = (state.cur + row_at(taken.node, tensors.paths)).view(-1)
        self._backbone.cache.move(source, state.cur + self._deep)
        words, self.frame = packed(draft, taken)
        if not self._is_begun:  # outside of any graph: the first warm-up
            self.out, self._is_begun = torch.empty_like(words), True
        self.out.copy_(words)
        state.cur.add_(row_at(taken.node, tensors.depths) + 1)
        state.root.copy_(root)
        state.hidden.copy_(hidden)

    def _run(self, draft: Draft) -> tuple[Tensor, Tensor]:
        """The backbone's pass at the device's own position: see step.Pass."""
        backbone, cur = self._backbone, self._state.cur
        self._places.copy_(cur + self._nodes)
        positions = cur + self._plan.tensors.depths
        masks = backbone.masks_behind(self._masks, cur, self._columns)
        hidden = backbone.run_fixed(draft.tokens, positions, masks, self._layers)
        return hidden, backbone.lm_head(hidden)
