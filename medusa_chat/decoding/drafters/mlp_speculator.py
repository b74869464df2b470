"""SpeculatorModel: IBM's MLP speculator (arXiv 2404.19124), heads with a state that goes on."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.own_layers import rows_of, scores_of
from medusa_chat.decoding.kv_cache import KVCache

EPS = 1e-6


class Stage(nn.Module):
    """One head. table: Embedding [V, w]; project: Linear to w; scale, shift [w]: of the norm; head:
    Linear of w, to the tokens."""

    def __init__(
        self, table: nn.Embedding, project: nn.Linear, scale: Tensor, shift: Tensor, head: nn.Linear
    ) -> None:
        super().__init__()
        self.table, self.project, self.head = table, project, head
        self.scale, self.shift = nn.Parameter(scale), nn.Parameter(shift)


class SpeculatorModel(nn.Module):
    """All heads. predicted: how many the file was made with, which its constants follow; is_scaled:
    whether the backbone's state is normed first."""

    kind, form = kinds.MLP, ()

    def __init__(self, stages: list[Stage], predicted: int, is_scaled: bool) -> None:
        super().__init__()
        self.stages, self._is_scaled = nn.ModuleList(stages), is_scaled
        first = stages[0]
        width = len(first.scale)
        kept = 0.5 ** (0.5 / predicted)
        self._weight = math.sqrt((1 - kept**2) * width / 2) / kept
        self.device, self.dtype = first.scale.device, first.scale.dtype
        self.deepest, self.vocabulary = len(stages), first.head.out_features
        self.ids = None

    def cache(self, capacity: int) -> KVCache | None:
        """See HeadModel."""
        return None

    def read(self, final: Tensor, cache: KVCache | None) -> Tensor:
        """See HeadModel."""
        state = final.to(self.device, self.dtype)
        return _normed(state) / math.sqrt(2) if self._is_scaled else state

    def step(self, level: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See HeadModel."""
        stage: Any = self.stages[level]
        embedded = rows_of(stage.table, tokens).to(self.device, self.dtype)
        mixed = _normed(stage.project(states) + self._weight * embedded)
        state = F.gelu(mixed * stage.scale + stage.shift)
        return state, scores_of(stage.head, state)


def _normed(x: Tensor) -> Tensor:
    """Divided by the root of its mean square, taken in fp32."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)
