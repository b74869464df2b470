"""HydraModel: Hydra's heads (arXiv 2402.05109), each of which reads the path before it."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.drafters import kinds
from medusa_chat.decoding.drafters.own_layers import (
    Lent,
    attended,
    own_cache,
    rows_of,
    scores_of,
)
from medusa_chat.decoding.kv_cache import KVCache


class HydraHead(nn.Module):
    """One head: [f, (i + 2) d] -> logits. residual, first: Linear of all that it reads, to d;
    blocks: Linears of d, in order, which may be one module; head: Linear of d, to the tokens."""

    def __init__(
        self, residual: nn.Linear, first: nn.Linear, blocks: list[nn.Linear], head: nn.Linear
    ) -> None:
        super().__init__()
        self.residual, self.first, self.head = residual, first, head
        self.blocks = nn.ModuleList(blocks)

    def forward(self, read: Tensor) -> Tensor:
        x = self.residual(read) + F.silu(self.first(read))
        for block in self.blocks:
            x = x + F.silu(block(x))
        return scores_of(self.head, x)


class HydraModel(nn.Module):
    """Heads of Hydra, and in Hydra++ a decoder layer and a norm before them, which read the
    backbone's states along the text. decoder: the stock layer with its rotary embedding, or None.
    """

    kind, form = kinds.HYDRA, ()

    def __init__(
        self, heads: list[HydraHead], decoder: Any, norm: nn.Module | None, lent: Lent
    ) -> None:
        super().__init__()
        self.heads = nn.ModuleList(heads)
        self.layers = decoder.layers if decoder is not None else None
        self.rotary = decoder.rotary_emb if decoder is not None else None
        self.norm, self._lent = norm, lent
        first = heads[0]
        self.device, self.dtype = first.first.weight.device, first.first.weight.dtype
        self.deepest, self.vocabulary = len(heads), first.head.out_features
        self.ids = None

    def cache(self, capacity: int) -> KVCache | None:
        """See HeadModel."""
        if self.layers is None:
            return None
        return own_cache(self.layers, capacity, self.device, self.dtype)

    def read(self, final: Tensor, cache: KVCache | None) -> Tensor:
        """See HeadModel."""
        x = final.to(self.device, self.dtype)
        if self.layers is None or self.norm is None or self.rotary is None or cache is None:
            return x
        start, count, layer = cache.length, len(x), self.layers[0]
        cache.begin()
        places = torch.arange(start, start + count, device=self.device)
        is_later = places[:, None] < torch.arange(start + count, device=self.device)
        mask = torch.zeros(is_later.shape, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(is_later, -torch.inf)[None, None]
        angles = self.rotary(x[None], places[None])
        x = x + attended(layer.self_attn, layer.input_layernorm(x), angles, mask, cache, 0)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        cache.extend(count)
        normed: Tensor = self.norm(x)
        return normed

    def step(self, level: int, states: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """See HeadModel: a head reads the state and the embeddings of the whole path."""
        embedded = rows_of(self._lent.embedding, tokens).to(self.device, self.dtype)
        read = torch.cat((states, embedded), -1)
        return read, self.heads[level](read)
