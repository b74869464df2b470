"""LogitHead: a backbone's LM head with what its family does to the logits."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn


class LogitHead:
    """The backbone's LM head with the scale or cap its family puts after it: [m, d] -> [m, V]."""

    def __init__(self, linear: nn.Module, config: Any) -> None:
        self.linear = linear
        self.scale = float(getattr(config, "logit_scale", None) or 1.0)  # Cohere
        self.scale /= float(getattr(config, "logits_scaling", None) or 1.0)  # Granite
        self.cap = getattr(config, "final_logit_softcapping", None)  # Gemma

    @property
    def is_plain(self) -> bool:
        """Whether the family neither scales nor caps its logits."""
        return self.scale == 1.0 and self.cap is None

    def __call__(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden).to(hidden.device)  # it may lie on another
        return self.finish(logits)

    def rows(self, tokens: Tensor) -> "LogitHead | None":
        """The LM head of the tokens int64 [S] alone, a copy of their rows: [m, d] -> [m, S]; None
        where rows cannot be taken: in 4 or 8 bits."""
        weight, bias = getattr(self.linear, "weight", None), getattr(self.linear, "bias", None)
        if weight is None or weight.dim() != 2 or not weight.is_floating_point():
            return None
        chosen = tokens.to(weight.device)
        with torch.device("meta"):
            short = nn.Linear(weight.shape[1], len(chosen), bias is not None)
        short.weight = nn.Parameter(weight.detach()[chosen], requires_grad=False)
        if bias is not None:
            short.bias = nn.Parameter(bias.detach()[chosen], requires_grad=False)
        found = copy(self)
        found.linear = short
        return found

    def finish(self, logits: Tensor) -> Tensor:
        """logits [m, V] of the linear -> [m, V] in the same dtype, with the family's scale or cap
        applied."""
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.cap is not None:
            logits = torch.tanh(logits / self.cap) * self.cap
        return logits
