"""Attention of few rows over many keys, in splits: by the kernel where it runs, else torch.

The kernel was tested in Triton's interpreter and never timed on a GPU: every load tries it, and
attention "medusa_split" is used where it measures as faster.
"""

from functools import cache, partial

import torch
from torch import Tensor

from medusa_chat.decoding.attention import NAME as TREE
from medusa_chat.decoding.attention import register, tree_attention
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.parity import Timer, agrees
from medusa_chat.decoding.backends.split_twin import split_attention

NAME = "medusa_split"
TOLERANCE = 2e-2  # of half precision against its reference in fp32
ROWS = 16  # of the steps that it is timed at
SHORT, LONG = 512, 8192  # keys: where it must lose nothing, and where it must win
GAIN, LOSS = 1.05, 0.98  # how many times as fast it must measure there


def split_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attention of query [1, H, q, D] over key and value [1, H_kv, s, D], mask [1, 1, q, s] or None
    -> [1, q, H, D], all of one dtype, as `tree_attention`: by the kernel where it runs,
    H / H_kv * q is at most 1024 and D a power of two from 16 to 256; otherwise by `tree_attention`
    itself."""
    rows, width = query.shape[2], query.shape[3]
    groups = query.shape[1] // key.shape[1]
    fits = width == value.shape[-1] and width in (16, 32, 64, 128, 256)
    if mask is None or rows * groups > 1024 or not fits or not has_kernel(query.device):
        return tree_attention(query, key, value, mask, scaling)
    from medusa_chat.decoding.backends.kernels.split import run

    folded = query[0].unflatten(0, (key.shape[1], groups)).flatten(1, 2).contiguous()
    scale = width**-0.5 if scaling is None else scaling
    out = run(folded, key[0], value[0], mask[0, 0], scale)
    mixed: Tensor = out.unflatten(1, (groups, rows)).flatten(0, 1).transpose(0, 1).unsqueeze(0)
    return mixed


def is_faster(backbone: Backbone, timer: Timer) -> bool:
    """Whether the kernel runs for the attention of this backbone, measures as faster over a long
    text, and as no slower over a short one."""
    cache = backbone.cache.layers.layers[0]
    heads = backbone.config.num_attention_heads
    if backbone.implementation != TREE or not has_kernel(backbone.device):
        return False
    gains = {}
    for keys in (SHORT, min(LONG, backbone.context)):
        key, value = cache.keys[:, :, :keys], cache.values[:, :, :keys]
        query = key.new_zeros(1, heads, ROWS, key.shape[-1])
        mask = key.new_zeros(1, 1, ROWS, key.shape[2])
        plain, split = (
            timer(partial(attend, query, key, value, mask))
            for attend in (tree_attention, split_tree_attention)
        )
        gains[keys] = plain / split
    return min(gains.values()) >= LOSS and max(gains.values()) >= GAIN


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs there and agrees with its reference; if not, that is logged, once."""
    if device.type != "cuda":
        return False
    instead = "split attention falls back to torch"
    return agrees(instead, lambda: difference(device), TOLERANCE)


def difference(device: torch.device, dtype: torch.dtype = torch.float16) -> float:
    """The kernel's largest difference from its reference on random numbers."""
    from medusa_chat.decoding.backends.kernels.split import run

    generator = torch.Generator(device).manual_seed(0)
    worst = 0.0
    for groups, rows, keys, width in ((1, 1, 40, 64), (4, 16, 700, 128), (2, 64, 1300, 64)):

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, device=device).to(dtype)

        sizes = (groups * rows, keys, keys)
        query, key, value = (draw(2, size, width) for size in sizes)
        mask = torch.zeros(rows, keys, device=device, dtype=dtype)
        for row in range(rows):
            mask[row, keys - rows + row + 1 :] = -torch.inf
        mask[:, : keys // 3] = -torch.inf  # as a window does: whole splits are not seen
        twin = split_attention(query.float(), key.float(), value.float(), mask.float(), 0.125)
        worst = max(worst, float((run(query, key, value, mask, 0.125) - twin).abs().max()))
    return worst


register(NAME, split_tree_attention)
