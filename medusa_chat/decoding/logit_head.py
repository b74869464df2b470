"""LogitHead: a backbone's LM head with what its family does to the logits."""

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from medusa_chat.decoding.settings import MAX_NODES


class LogitHead:
    """The backbone's LM head with the scale or cap its family puts after it: [m, d] -> [m, V].

    is_wide: whether logits of a step are float32 where the weight has 16 bits: rounded to 16 bits
    the two largest of a row are often equal. A load on CUDA sets it (checkpoints/kernel_trial.py).
    """

    is_wide = False

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
        """[m, d] -> [m, V], float32 where `is_wide` and the rows are a step's (those of a count of
        many keep their 16 bits and half the memory), else in the linear's dtype."""
        if self.is_wide and self.can_widen(hidden):
            return self.finish(self.widened(hidden))
        logits: Tensor = self.linear(hidden).to(hidden.device)  # it may lie on another
        return self.finish(logits)

    def can_widen(self, hidden: Tensor) -> bool:
        """Whether `widened` takes the rows hidden [m, d]: it has no derivative, and is not what
        autocast knows."""
        if type(self.linear) is not nn.Linear or torch.is_grad_enabled():
            return False
        weight = self.linear.weight
        fits = (hidden.dtype, hidden.device) == (weight.dtype, weight.device)
        return fits and len(hidden) <= MAX_NODES and hidden.dtype.itemsize == 2

    def widened(self, hidden: Tensor) -> Tensor:
        """[m, d] in 16 bits -> [m, V] float32, the sums of the product as they are."""
        linear: Any = self.linear
        logits = torch.mm(hidden, linear.weight.t(), out_dtype=torch.float32)
        return logits if linear.bias is None else logits.add_(linear.bias)

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
