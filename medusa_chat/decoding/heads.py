"""MedusaHeads: the extra heads, all of them as one batched product."""

import re
from collections.abc import Callable, Mapping
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.errors import ModelError

LAYER = re.compile(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$")
LM_HEAD = re.compile(r"^(\d+)\.(\d+)\.weight$")


class MedusaHeads(nn.Module):
    """K heads of L residual layers each: x + SiLU(W x + b), then an LM head of its own or shared.

    Medusa, arXiv 2401.10774, section 2.1.1. Head k (from 0) predicts the token at t + k + 2 from
    the hidden state at t. weight [L, K, d, d], bias [L, K, d]; lm_weight [K, V, d], or None for
    heads that share the backbone's LM head. New heads are zero, so that their logits are the LM
    head's.
    """

    def __init__(self, heads: int, hidden: int, layers: int = 1, vocabulary: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(layers, heads, hidden, hidden))
        self.bias = nn.Parameter(torch.zeros(layers, heads, hidden))
        own = None if vocabulary is None else nn.Parameter(torch.zeros(heads, vocabulary, hidden))
        self.lm_weight: nn.Parameter | None
        self.register_parameter("lm_weight", own)

    def __len__(self) -> int:
        return self.weight.shape[1]

    @property
    def is_shared(self) -> bool:
        """Whether the heads use the backbone's LM head."""
        return self.lm_weight is None

    def hidden_states(self, hidden: Tensor, heads: int | None = None) -> Tensor:
        """[n, d] -> [K, n, d], what each of the first `heads` heads gives to its LM head."""
        x = hidden.expand(heads or len(self), *hidden.shape)
        for weight, bias in zip(self.weight[:, :heads], self.bias[:, :heads], strict=True):
            x = x + F.silu(torch.baddbmm(bias.unsqueeze(1), x, weight.transpose(1, 2)))
        return x

    def forward(
        self, hidden: Tensor, lm_head: Callable[[Tensor], Tensor], heads: int | None = None
    ) -> Tensor:
        """[n, d] -> logits [K, n, V] of the first `heads` heads (all when None).

        lm_head: [m, d] -> [m, V], the backbone's, used where the heads have none.
        """
        x = self.hidden_states(hidden, heads)
        if self.lm_weight is None:
            logits: Tensor = lm_head(x.flatten(0, 1)).unflatten(0, x.shape[:2])
            return logits
        return torch.bmm(x, self.lm_weight[:heads].transpose(1, 2))

    def to_tensors(self) -> dict[str, Tensor]:
        """The reference's names: `{head}.{layer}.linear.weight|bias`, `{head}.{L}.weight`."""
        layers = self.weight.shape[0]
        tensors = {}
        for head in range(len(self)):
            for layer in range(layers):
                tensors[f"{head}.{layer}.linear.weight"] = self.weight[layer, head]
                tensors[f"{head}.{layer}.linear.bias"] = self.bias[layer, head]
            if self.lm_weight is not None:
                tensors[f"{head}.{layers}.weight"] = self.lm_weight[head]
        return {name: t.detach().clone().contiguous() for name, t in tensors.items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """Heads from the reference's names; a missing bias is zero. Raises ModelError."""
        layers = {(int(m[1]), int(m[2])) for m in map(LAYER.match, tensors) if m}
        own = {int(m[1]) for m in map(LM_HEAD.match, tensors) if m}
        unknown = [n for n in tensors if not LAYER.match(n) and not LM_HEAD.match(n)]
        if unknown or not layers:
            raise ModelError(f"no Medusa heads: unexpected tensor {(unknown or ['(none)'])[0]!r}")
        num_heads, num_layers = (max(index) + 1 for index in zip(*layers, strict=True))
        if len(layers) != num_heads * num_layers or (own and len(own) != num_heads):
            raise ModelError(f"Medusa heads are incomplete: {len(layers)} layers, {len(own)} own")
        hidden = tensors["0.0.linear.weight"].shape[-1]
        vocabulary = tensors[f"0.{num_layers}.weight"].shape[0] if own else None
        heads = cls(num_heads, hidden, num_layers, vocabulary).to(
            tensors["0.0.linear.weight"].dtype
        )
        with torch.no_grad():
            for head, layer in layers:
                _copy(heads.weight[layer, head], tensors, f"{head}.{layer}.linear.weight")
                if f"{head}.{layer}.linear.bias" in tensors:
                    _copy(heads.bias[layer, head], tensors, f"{head}.{layer}.linear.bias")
            for head in own:
                assert heads.lm_weight is not None
                _copy(heads.lm_weight[head], tensors, f"{head}.{num_layers}.weight")
        return heads.requires_grad_(False)


def _copy(target: Tensor, tensors: Mapping[str, Tensor], name: str) -> None:
    if tensors[name].shape != target.shape:
        raise ModelError(
            f"Medusa head tensor {name} is {tuple(tensors[name].shape)}, not {tuple(target.shape)}"
        )
    target.copy_(tensors[name])
