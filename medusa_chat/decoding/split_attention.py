"""Attention of few rows over many keys, in splits: the kernel's torch twin, and the door to it.

Attention "medusa_split" is not chosen by default: the kernel was tested in Triton's interpreter
and never timed on a GPU.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from medusa_chat.decoding.attention import tree_attention
from medusa_chat.decoding.parity import agrees

NAME = "medusa_split"
SPLIT = 256  # keys of one split
TOLERANCE = 2e-2  # of half precision against its twin in fp32


def split_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float
) -> Tensor:
    """query [H_kv, G * q, D] (groups of a row's heads beside each other: row g * q + i), key and
    value [H_kv, s, D], mask additive [q, s] -> [H_kv, G * q, D].

    Every split of SPLIT keys gives its own softmax and its log of the sum; the parts are merged
    by those. A split in which a row sees nothing counts nothing.
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
    """Parts [p, H_kv, r, D] with their logs of sums [p, H_kv, r, 1] -> [H_kv, r, D]."""
    shares = torch.softmax(sums, 0)
    return (outs * shares).sum(0)


def split_tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """As `tree_attention`, by the kernel where there is one, the rows are few and D is a power of
    two from 16 to 256; otherwise `tree_attention` itself."""
    rows, width = query.shape[2], query.shape[3]
    groups = query.shape[1] // key.shape[1]
    fits = width == value.shape[-1] and width in (16, 32, 64, 128, 256)
    if attention_mask is None or rows * groups > 1024 or not fits or not has_kernel(query.device):
        return tree_attention(module, query, key, value, attention_mask, scaling)
    from medusa_chat.decoding.kernels.split import run

    folded = query[0].unflatten(0, (key.shape[1], groups)).flatten(1, 2).contiguous()
    scale = width**-0.5 if scaling is None else scaling
    out = run(folded, key[0], value[0], attention_mask[0, 0], scale)
    return out.unflatten(1, (groups, rows)).flatten(0, 1).transpose(0, 1).unsqueeze(0), None


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs there and agrees with its twin; where not, that is logged, once."""
    if device.type != "cuda":
        return False
    instead = "split attention falls back to torch"
    return agrees(instead, lambda: difference(device), TOLERANCE)


def difference(device: torch.device, dtype: torch.dtype = torch.float16) -> float:
    """The kernel's largest difference from its twin on random numbers."""
    from medusa_chat.decoding.kernels.split import run

    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for groups, rows, keys in ((1, 1, 40), (4, 16, 700), (2, 64, 1300)):

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        query, key, value = draw(2, groups * rows, 64), draw(2, keys, 64), draw(2, keys, 64)
        mask = torch.zeros(rows, keys, device=device, dtype=dtype)
        for row in range(rows):
            mask[row, keys - rows + row + 1 :] = -torch.inf
        mask[:, : keys // 3] = -torch.inf  # as a window does: whole splits are not seen
        twin = split_attention(query.float(), key.float(), value.float(), mask.float(), 0.125)
        worst = max(worst, float((run(query, key, value, mask, 0.125) - twin).abs().max()))
    return worst


AttentionInterface.register(NAME, split_tree_attention)
