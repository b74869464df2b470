"""EagleModel: the layers of an EAGLE drafter, which read the backbone's own states.

EAGLE (arXiv 2401.15077) reads the state after the backbone's final norm, EAGLE-3 (2503.01840) the
residual at several of its layers. Both predict a token from such a state and the token after it,
and feed their own output back where the backbone has none yet.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.attention import tree_attention
from medusa_chat.decoding.kv_cache import KVCache, Shape


@dataclass(frozen=True)
class EagleForm:
    """What an EAGLE drafter computes, beside the shapes of its weights.

    taps: places in transformers' `hidden_states` that it reads, 0 the embeddings; empty for the
    state after the final norm (EAGLE-1), whose layer gets one sum of state and embedding in place
    of both side by side. is_normed_first: the normed state is what the first layer adds to.
    feeds_norm: the normed output is fed back (EAGLE-3.1).
    """

    taps: tuple[int, ...] = ()
    is_normed_first: bool = False
    feeds_norm: bool = False


class EagleModel(nn.Module):
    """The drafter's modules. fc: Linear of what is read, [k d] or [2 d], to its own width; norms:
    of the whole that `fc` reads or of each tap, or none; layers: stock ones of transformers, the
    first with wide products in EAGLE-3; width: numbers of a state, as they read it and feed it
    back; hidden_norm: of the state that it gets; norm: the last one, None in EAGLE-1; table, head:
    its own embeddings and LM head, None where it reads those of the backbone, which are the pair
    `backbone`; vocabulary: tokens of the LM head; ids int64 [V_d]: the backbone's id of each of its
    tokens, None where they are the same."""

    def __init__(
        self,
        form: EagleForm,
        decoder: Any,
        fc: nn.Linear,
        norms: list[nn.Module],
        hidden_norm: nn.Module | None,
        norm: nn.Module | None,
        table: nn.Embedding | None,
        head: nn.Linear | None,
        backbone: tuple[Any, Any],
        vocabulary: int,
        ids: Tensor | None,
    ) -> None:
        super().__init__()
        self.form, self.fc, self.norms = form, fc, nn.ModuleList(norms)
        self.layers, self.rotary = decoder.layers, decoder.rotary_emb
        self.hidden_norm, self.norm = hidden_norm, norm
        self.table, self.head, self._backbone = table, head, backbone
        self.vocabulary, self.width = vocabulary, fc.out_features
        self.device, self.dtype = fc.weight.device, fc.weight.dtype
        attention = self.layers[0].self_attn
        self._heads = attention.k_proj.out_features // attention.head_dim
        self.ids: Tensor | None
        self.register_buffer("ids", ids, persistent=False)

    def cache(self, capacity: int) -> KVCache:
        """An empty cache of its layers."""
        attention = self.layers[0].self_attn
        shape = Shape(self._heads, attention.head_dim, self.device)
        return KVCache([shape] * 2 * len(self.layers), capacity, self.dtype)

    def fused(self, final: Tensor, taps: Tensor | None) -> Tensor:
        """The states [m, w] that the layers read for m tokens, of the backbone's final [m, d] or
        its taps [m, k, d]."""
        if not self.form.taps:
            return final.to(self.device, self.dtype)
        assert taps is not None
        read = taps.to(self.device, self.dtype)
        if len(self.norms) == 1:
            read = self.norms[0](read.flatten(1))
        elif self.norms:
            parts = zip(self.norms, read.unbind(1), strict=True)
            read = torch.stack([norm(part) for norm, part in parts], 1)
        out: Tensor = self.fc(read.flatten(1))
        return out

    def forward(
        self, states: Tensor, tokens: Tensor, places: Tensor, mask: Tensor | None, cache: KVCache
    ) -> tuple[Tensor, Tensor]:
        """One pass: states [n, w], each with the token after it, int64 [n], at `places` int64 [n];
        mask additive [n, s] over the cache's valid rows and these, None for a causal pass over the
        rows alone -> what is fed back [n, w], and log probabilities float32 [n, V_d]. Keys and
        values lie behind the cache's valid rows."""
        cache.begin()
        embedded = self._embedded(tokens)
        angles = self.rotary(states[None], places[None])
        four = None if mask is None else mask[None, None]
        hidden = states
        for index, layer in enumerate(self.layers):
            if index:
                x = layer.input_layernorm(hidden)
            elif self.form.taps:
                assert self.hidden_norm is not None
                normed = self.hidden_norm(hidden)
                x = torch.cat((layer.input_layernorm(embedded), normed), -1)
                hidden = normed if self.form.is_normed_first else hidden
            else:
                x = hidden = self.fc(torch.cat((embedded, hidden), -1))
            hidden = hidden + _attended(layer.self_attn, x, angles, four, cache, index)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        last = hidden if self.norm is None else self.norm(hidden)
        head: Any = self._backbone[1] if self.head is None else self.head
        scores = head(last).float().log_softmax(-1)
        return last if self.form.feeds_norm else hidden, scores

    def _embedded(self, tokens: Tensor) -> Tensor:
        """The rows of the table as they are, without a family's scale: [n] -> [n, d]."""
        table: Any = self._backbone[0] if self.table is None else self.table
        if hasattr(table, "rows"):
            rows = table.rows(tokens)
        else:  # a backbone may have padding beyond the drafter's table
            rows = F.embedding(tokens.clamp(max=len(table.weight) - 1), table.weight)
        embedded: Tensor = rows.to(self.device, self.dtype)
        return embedded


def _attended(
    attention: Any,
    x: Tensor,
    angles: tuple[Tensor, Tensor],
    mask: Tensor | None,
    cache: KVCache,
    index: int,
) -> Tensor:
    """What an attention block of transformers adds: x [n, i] -> [n, w]."""
    split = (len(x), -1, attention.head_dim)
    query, key, value = (
        getattr(attention, f"{name}_proj")(x).view(split) for name in ("q", "k", "v")
    )
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = _turned(query, angles), _turned(key, angles)
    rows = (part.transpose(0, 1)[None] for part in (key, value))
    keys, values = cache.layers.layers[index].update(*rows)
    mixed = tree_attention(query.transpose(0, 1)[None], keys, values, mask, attention.scaling)
    out: Tensor = attention.o_proj(mixed[0].flatten(1))
    return out


def _turned(rows: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Heads [n, H, D] turned by their positions."""
    cos, sin = (angle[0][:, None] for angle in angles)
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin
