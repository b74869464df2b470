"""The attention functions that we register with transformers: "medusa_tree", "medusa_steady"."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

NAME = "medusa_tree"
STEADY = "medusa_steady"  # see padded_rows.py
MOST_STEADY = 256  # rows that a step can have


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of query [1, H, q, D] over keys and values [1, H_kv, s, D] -> [1, q, H, D].

    attention_mask: additive [1, 1, q, s], or None for a causal pass over q = s rows. Grouped keys
    are never repeated. On a CPU in half precision the sums are taken in fp64, so that a row gives
    the same bits whatever rows stand beside it: a tree then decodes to plain decoding's tokens.
    """
    heads, rows = query.shape[1], query.shape[2]
    groups = heads // key.shape[1]
    q = query[0].unflatten(0, (key.shape[1], groups))  # [H_kv, G, q, D]
    k, v = key[0].unsqueeze(1), value[0].unsqueeze(1)
    if query.dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu":
        out = _double_attention(q, k, v, attention_mask, scaling)
    else:
        shape = (key.shape[1], groups)
        out = F.scaled_dot_product_attention(
            q,
            k.expand(*shape, *k.shape[2:]),
            v.expand(*shape, *v.shape[2:]),
            attn_mask=attention_mask,
            is_causal=attention_mask is None and rows > 1,
            scale=scaling,
        )
    return out.reshape(1, heads, rows, value.shape[-1]).transpose(1, 2), None


def _double_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None
) -> Tensor:
    """Attention with sums in fp64: q [H_kv, G, q, D], k and v [H_kv, 1, s, D], mask [1, 1, q, s] ->
    [H_kv, G, q, D] in q's dtype."""
    groups, rows = q.shape[1], q.shape[2]
    folded = q.flatten(1, 2).double()  # [H_kv, G * q, D]
    scores = folded @ k[:, 0].double().transpose(1, 2)
    scores *= q.shape[-1] ** -0.5 if scaling is None else scaling
    scores = scores.unflatten(1, (groups, rows))
    if mask is not None:
        scores += mask[0]
    elif rows > 1:
        scores += torch.full((rows, rows), -torch.inf, dtype=scores.dtype).triu(1)
    weights = torch.softmax(scores, -1).flatten(1, 2)
    out: Tensor = (weights @ v[:, 0].double()).unflatten(1, (groups, rows)).to(q.dtype)
    return out


def steady_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """`tree_attention` with sums in fp64 on every device: query [1, H, q, D], key and value
    [1, H_kv, s, D], mask [1, 1, q, s] or None -> [1, q, H, D].

    More rows than a step can have (a prompt) go to `tree_attention` itself.
    """
    if attention_mask is None or query.shape[2] > MOST_STEADY:
        return tree_attention(module, query, key, value, attention_mask, scaling)
    groups = query.shape[1] // key.shape[1]
    q = query[0].unflatten(0, (key.shape[1], groups))
    k, v = key[0].unsqueeze(1), value[0].unsqueeze(1)
    out = _double_attention(q, k, v, attention_mask, scaling)
    shape = (1, query.shape[1], query.shape[2], value.shape[-1])
    return out.reshape(shape).transpose(1, 2), None


OURS = {NAME: tree_attention, STEADY: steady_attention}
for name, function in OURS.items():
    AttentionInterface.register(name, function)
