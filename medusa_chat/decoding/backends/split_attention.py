"""Attention of a draft's nodes in parts, by a node mask: by the kernel where it runs, else torch.

The length of the text is read on the device, so that one recorded step serves all lengths. A load
uses attention "medusa_split" on cards where it is known to be faster, if it agrees with torch.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from medusa_chat.decoding.attention import NAME as TREE
from medusa_chat.decoding.attention import NodeMask, additive, register, sights, tree_attention
from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.backends.parity import TOLERANCES, agrees, largest
from medusa_chat.decoding.draft import TreeTensors
from medusa_chat.decoding.tree import Tree

NAME = "medusa_split"
WIDTHS = (16, 32, 64, 128, 256)  # of a head
ROWS = 16  # of the steps that it is timed at
SHORT, LONG = 512, 8192  # keys: where it must lose nothing, and where it must win
CASES = (  # groups, nodes, tokens before them, window
    (1, 1, 39, None),
    (4, 16, 300, None),
    (2, 70, 500, None),  # two words a row
    (2, 16, 400, 150),
    (1, 8, 30, 4),  # a node that sees no text
    (1, 3, 0, None),
)


def split_tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention as `tree_attention`, but a mask may be a node mask, int64 [1, 1, n, 2 + w]: then by
    the kernel where it runs, over keys and values [1, H_kv, any, D] of which it reads the text and
    the draft alone. It knows no cap: models that have one do not use it."""
    if mask is None or mask.is_floating_point():
        return tree_attention(query, key, value, mask, scaling, cap)
    assert cap is None
    width = query.shape[-1]
    if not has_kernel(query.device, query.dtype, width):
        return reference(query, key, value, mask[0, 0], scaling)
    from medusa_chat.decoding.backends.kernels.split import run

    return run(query, key, value, mask[0, 0], width**-0.5 if scaling is None else scaling)


def reference(
    query: Tensor, key: Tensor, value: Tensor, words: Tensor, scaling: float | None = None
) -> Tensor:
    """The kernel's reference: attention by torch over all keys. query [1, H, n, D], key and value
    [1, H_kv, s, D] of one dtype, words int64 [n, 2 + w] -> [1, n, H, D] of that dtype."""
    columns = torch.arange(key.shape[2], device=key.device)
    mask = additive(words, sights(words), columns, query.dtype)
    return tree_attention(query, key, value, mask[None, None], scaling)


def use(backbone: Backbone, check: Callable[[], float]) -> list[str]:
    """Let a backbone attend by the kernel where it runs and agrees with its reference and `check`
    of a tree step, which raises where that is wrong, passes; a sentence if so."""
    if not _fits(backbone):
        return []
    before = backbone.implementation
    backbone.attend_by(NAME)
    if agrees("attention stays with torch's kernel", check, torch.inf):
        return ["split attention (flash decoding) by our kernel"]
    backbone.attend_by(before)
    return []


def _fits(backbone: Backbone) -> bool:
    """Whether the kernel runs for the attention of this backbone."""
    layers: list[Any] = backbone.cache.layers.layers
    keys = layers[0].keys
    is_plain = all(
        layer.keys.shape == layer.values.shape == keys.shape and layer.keys.shape[-1] in WIDTHS
        for layer in layers
    )
    is_capped = getattr(backbone.config, "attn_logit_softcapping", None) is not None
    if backbone.implementation != TREE or not is_plain or is_capped:
        return False
    return has_kernel(backbone.device, keys.dtype, keys.shape[-1])


def timed_calls(
    heads: tuple[int, int], width: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Callable[[], Tensor], Callable[[], Tensor]]]:
    """For kernel_times.py: the attention of a chain of ROWS nodes behind a short and a long text,
    as a label, a call of torch's and one of ours. heads: of queries and of keys."""
    keys, values = torch.zeros(2, 1, heads[1], LONG, width, device=device, dtype=dtype)
    query = keys.new_zeros(1, heads[0], ROWS, width)
    chain = Tree.from_choices([0] * depth for depth in range(1, ROWS))
    nodes = NodeMask.of(TreeTensors.of(chain, device), None)
    for count in (SHORT, LONG):
        mask = keys.new_zeros(1, 1, ROWS, count)
        read = keys[:, :, :count], values[:, :, :count]
        words = nodes.behind(count - ROWS)[None, None]
        ours = partial(split_tree_attention, query, keys, values, words)
        yield f"{count} keys", partial(tree_attention, query, *read, mask), ours


@cache
def has_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Whether the kernel runs there, for such keys and heads of this width, and agrees with its
    reference; if not, that is logged, once."""
    if device.type != "cuda" or width not in WIDTHS or dtype not in TOLERANCES:
        return False
    instead = "split attention falls back to torch"
    return agrees(instead, lambda: difference(device, dtype, width), TOLERANCES[dtype])


def difference(device: torch.device, dtype: torch.dtype, width: int) -> float:
    """The kernel's largest difference from its reference in fp32 on random numbers."""
    generator = torch.Generator(device).manual_seed(0)
    return largest(_off(generator, dtype, width, *case) for case in CASES)


def _off(
    generator: torch.Generator,
    dtype: torch.dtype,
    width: int,
    groups: int,
    nodes: int,
    length: int,
    window: int | None,
) -> float:
    """The difference in one of CASES. What lies behind the draft is no number: it is not read."""
    from medusa_chat.decoding.backends.kernels.split import run

    def draw(*shape: int) -> Tensor:
        return torch.randn(1, *shape, width, generator=generator, device=generator.device).to(dtype)

    count = length + nodes
    query, key, value = draw(2 * groups, nodes), draw(2, count + 40), draw(2, count + 40)
    key[:, :, count:] = value[:, :, count:] = torch.nan
    rest = range(nodes - 1)
    tree = Tree((-1, *(node // 2 for node in rest)), (-1, *(node % 2 for node in rest)))
    mask = NodeMask.of(TreeTensors.of(tree, generator.device), window).behind(length)
    keys, values = (t[:, :, :count].float() for t in (key, value))
    expected = reference(query.float(), keys, values, mask, 0.125)
    return float((run(query, key, value, mask, 0.125) - expected).abs().max())


register(NAME, split_tree_attention, takes_words=True)
