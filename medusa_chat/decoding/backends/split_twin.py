"""The torch reference of split attention: few rows over many keys, in parts that are merged."""

import torch
from torch import Tensor

SPLIT = 256  # keys of one split


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """query [H_kv, G * q, D] (groups of a row's heads beside each other: row g * q + i), key and
    value [H_kv, s, D], mask additive [q, s] -> [H_kv, G * q, D] in the dtype of query.

    Every split of SPLIT keys gives its own softmax and its log of the sum; the parts are merged
    by those. A split in which a row sees no key has no weight in it.
    """
    groups = query.shape[1] // mask.shape[0]
    outs, sums = [], []
    for start in range(0, key.shape[1], SPLIT):
        part = slice(start, min(start + SPLIT, key.shape[1]))
        scores = query.float() @ key[:, part].float().transpose(1, 2) * scaling
        scores = scores + mask[:, part].float().repeat(groups, 1)
        top = scores.amax(-1, keepdim=True).clamp(min=-1e30)
        weights = torch.exp(scores - top)
        total = weights.sum(-1, keepdim=True)
        outs.append(weights @ value[:, part].float() / total.clamp(min=1e-30))
        sums.append(torch.where(total > 0, top + total.log(), -torch.inf))
    return merge(torch.stack(outs), torch.stack(sums)).to(query.dtype)


def merge(outs: Tensor, sums: Tensor) -> Tensor:
    """Parts [p, H_kv, r, D] with their logs of sums [p, H_kv, r, 1] -> [H_kv, r, D], all
    float32."""
    shares = torch.softmax(sums, 0)
    return (outs * shares).sum(0)
