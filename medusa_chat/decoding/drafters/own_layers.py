"""Attention over a drafter's own cache, and what a drafter borrows of the backbone."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from medusa_chat.decoding.attention import tree_attention
from medusa_chat.decoding.kv_cache import KVCache, Shape

Angles = tuple[Tensor, Tensor]
WIDTH = 8  # children of a node, and nodes of a level that are read


class Lent(NamedTuple):
    """Of the backbone: its embedding module, its LM head (backbone.LogitHead) and its config."""

    embedding: Any
    head: Any
    config: Any = None


class Names:
    """The backbone's ids of a drafter's tokens. is_whole: whether the backbone has all of them;
    width: how many children a node gets."""

    def __init__(self, ids: Tensor | None, own: int, vocabulary: int, device: torch.device) -> None:
        """ids int64 [V_d], None where they are the same; own: V_d; vocabulary: tokens that may be
        drafted."""
        self.width, self.device = min(WIDTH, own), device
        self.ids = torch.arange(own, device=device) if ids is None else ids
        self._fits = self.ids < vocabulary
        self.is_whole = own <= vocabulary if ids is None else bool(self._fits.all())

    def best(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Log probabilities float32 [n, V_d] -> of each row the best tokens, in the ids of the
        backbone int64 [n, width], and their probabilities float32, falling; 0 for what the backbone
        does not have."""
        if not self.is_whole:
            scores = scores.masked_fill(~self._fits, -torch.inf)
        values, best = scores.topk(self.width)
        return self.ids[best], values.exp().nan_to_num(0.0)


class Fixed:
    """A drafter's cache in passes of fixed shapes: rows are written at `places` int64 [n] on the
    device, and read up to `bucket`."""

    def __init__(self, cache: KVCache, places: Tensor, bucket: int) -> None:
        self.layers = cache.fixed(places, bucket)

    def begin(self) -> None:
        """Does nothing: the places are given."""


def own_cache(layers: Any, capacity: int, device: torch.device, dtype: torch.dtype) -> KVCache:
    """An empty cache of stock decoder layers."""
    attention = layers[0].self_attn
    heads = attention.config.num_key_value_heads
    return KVCache([Shape(heads, attention.head_dim, device)] * 2 * len(layers), capacity, dtype)


def scores_of(head: Any, hidden: Tensor) -> Tensor:
    """[n, w] -> the logits of an LM head, float32 [n, V]."""
    linear: Any = getattr(head, "linear", head)
    if type(linear) is nn.Linear:  # of a backbone in another dtype
        hidden = hidden.to(linear.weight.dtype)
    logits: Tensor = head(hidden).float()
    return logits


def rows_of(table: Any, tokens: Tensor) -> Tensor:
    """The rows of an embedding as they are, without a family's scale: [n] -> [n, d]."""
    if hasattr(table, "rows"):
        rows: Tensor = table.rows(tokens)
        return rows
    # a backbone may have padding beyond the drafter's table
    return F.embedding(tokens.clamp(max=len(table.weight) - 1), table.weight)


def keys_and_values(attention: Any, x: Tensor, angles: Angles) -> tuple[Tensor, Tensor]:
    """The keys, turned by their positions, and values of rows x [n, i]: [1, H_kv, n, D]."""
    split = (len(x), -1, attention.head_dim)
    key, value = attention.k_proj(x).view(split), attention.v_proj(x).view(split)
    if hasattr(attention, "k_norm"):
        key = attention.k_norm(key)
    return turned(key, angles).transpose(0, 1)[None], value.transpose(0, 1)[None]


def attended(
    attention: Any,
    x: Tensor,
    angles: Angles,
    mask: Tensor | None,
    cache: KVCache | Fixed,
    index: int,
) -> Tensor:
    """What an attention block of transformers adds: x [n, i] -> [n, w]. mask: additive
    [1, 1, n, s], None for a causal pass over the rows alone. Keys and values of layer `index` lie
    behind the cache's valid rows."""
    query = attention.q_proj(x).view(len(x), -1, attention.head_dim)
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    query = turned(query, angles).transpose(0, 1)[None]
    rows = keys_and_values(attention, x, angles)
    keys, values = cache.layers.layers[index].update(*rows)
    mixed = tree_attention(query, keys, values, mask, attention.scaling)
    out: Tensor = attention.o_proj(mixed[0].flatten(1))
    return out


def turned(rows: Tensor, angles: Angles) -> Tensor:
    """Heads [n, H, D] turned by their positions."""
    cos, sin = (angle[0][:, None] for angle in angles)
    first, second = rows.chunk(2, -1)
    return rows * cos + torch.cat((-second, first), -1) * sin
