"""The attention functions that we register with transformers, "medusa_tree" first, and masks.

A node mask says what each node of a draft sees of the text and of the draft, in 64-bit words: int64
[n, 2 + w] for n nodes, w = ceil(n / 64); in each row the first place of the text that the node
sees, the length of the text, and a bit for each node of the draft that it sees. `additive` makes of
it a mask of numbers for attention that does not take words.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from medusa_chat.decoding.draft import TreeTensors

NAME = "medusa_tree"
BITS = 64
FIXED = 2  # numbers before the words, which grow with the text
NO_WINDOW = -(2**40)  # as the first place: before every text

# query, key, value, additive mask or None, scaling, cap -> mixed values; as `tree_attention`
Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None, float | None, float | None], Tensor]


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    cap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention of query [1, H, q, D] over keys and values [1, H_kv, s, D] -> [1, q, H, D].

    mask: additive [1, 1, q, s], or `fold`ed already, or None for a causal pass over q = s rows.
    cap: scores become cap * tanh(score / cap) before the mask (Gemma 2). sinks [H]: a score beside
    the keys' for each head, which takes its share and adds nothing (gpt-oss).
    Grouped keys are never repeated nor expanded: the queries of a group stand below each other as
    rows (keys of stride 0 with a mask gave wrong numbers on CUDA: pytorch issue 191937). On a CPU
    in half precision the sums are taken in fp64, so that a row gives the same bits whatever rows
    stand beside it: a tree then decodes to plain decoding's tokens.
    """
    heads, rows = query.shape[1], query.shape[2]
    groups = heads // key.shape[1]
    folded = query[0].unflatten(0, (key.shape[1], groups)).flatten(1, 2)  # [H_kv, G * q, D]
    if mask is None and rows > 1:
        hidden = torch.full((rows, rows), -torch.inf, dtype=query.dtype, device=query.device)
        mask = hidden.triu(1)[None, None]
    is_rounded = query.dtype in (torch.bfloat16, torch.float16) and query.device.type == "cpu"
    if is_rounded or cap is not None or sinks is not None:
        wide = torch.float64 if is_rounded else torch.float32
        beside = None if sinks is None else sinks.view(-1, groups).repeat_interleave(rows, 1)
        out = _wide_attention(folded, key[0], value[0], mask, scaling, cap, wide, beside)
    else:
        if mask is not None:
            is_folded = mask.shape[2] == folded.shape[1]
            mask = aligned(mask) if is_folded else fold(mask, groups)
        out = F.scaled_dot_product_attention(
            folded[None], key, value, attn_mask=mask, scale=scaling
        )
    # contiguous, for some families view it; others would flatten it by the same copy
    return out.reshape(1, heads, rows, out.shape[-1]).transpose(1, 2).contiguous()


def disable_cudnn_attention(device: torch.device) -> None:
    """Disable cuDNN's attention on a CUDA device: it builds a plan for every new length of the
    text (50 to 150 ms each), and masks and key lengths change at every step here."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def aligned(mask: Tensor) -> Tensor:
    """The mask [..., s], of its dtype, where every row begins at a multiple of 8 numbers and of
    16 bytes.

    torch's memory-efficient attention reads masks in vectors: from another address it raises, or
    faults and takes the CUDA context with it (pytorch issues 183484 and 188246).
    """
    strides = zip(mask.shape[:-1], mask.stride()[:-1], strict=True)
    is_aligned = mask.data_ptr() % 16 == 0 and mask.stride(-1) == 1
    if is_aligned and all(count == 1 or stride % 8 == 0 for count, stride in strides):
        return mask
    width = mask.shape[-1]
    padded = mask.new_zeros(*mask.shape[:-1], width + -width % 8)[..., :width]
    return padded.copy_(mask)


def fold(mask: Tensor, groups: int) -> Tensor:
    """A mask [1, 1, q, s] of any dtype for queries whose groups are folded into rows:
    [1, 1, G * q, s]."""
    if groups == 1:
        return aligned(mask)
    rows, width = mask.shape[2:]
    padded = mask.new_zeros(1, 1, groups, rows, width + -width % 8)[..., :width]
    return padded.copy_(mask.unsqueeze(2)).flatten(2, 3)


def _wide_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    cap: float | None,
    wide: torch.dtype,
    beside: Tensor | None = None,
) -> Tensor:
    """Attention computed in the dtype `wide`: query [H_kv, G * q, D], key and value [H_kv, s, D],
    mask additive [1, 1, q, s], beside [H_kv, G * q]: a score that takes its share of each row ->
    [H_kv, G * q, D] in the query's dtype."""
    scores = query.to(wide) @ key.to(wide).transpose(1, 2)
    scores *= query.shape[-1] ** -0.5 if scaling is None else scaling
    if cap is not None:
        scores = torch.tanh(scores / cap) * cap
    if mask is not None:
        by_group = scores.unflatten(1, (-1, mask.shape[2]))
        by_group += mask[0]
    if beside is None:
        return (torch.softmax(scores, -1) @ value.to(wide)).to(query.dtype)
    shares = torch.softmax(torch.cat((scores, beside.to(wide).unsqueeze(-1)), -1), -1)[..., :-1]
    return (shares @ value.to(wide)).to(query.dtype)


OURS: dict[str, Attention] = {}  # by name
TAKE_WORDS: set[str] = set()  # those that take node masks, too


def register(name: str, attend: Attention, takes_words: bool = False) -> None:
    """Let models attend by a function of ours, under a name."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        return attend(query, key, value, attention_mask, scaling, softcap), None

    OURS[name] = attend
    if takes_words:
        TAKE_WORDS.add(name)
    AttentionInterface.register(name, attention)


register(NAME, tree_attention)


@dataclass(frozen=True)
class NodeMask:
    """The mask of a tree behind texts of any length: words [n, 2 + w] as for length 0, and the
    words' `sights`."""

    words: Tensor
    seen: Tensor
    has_window: bool

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, tensors: TreeTensors, window: int | None) -> "NodeMask":
        """The mask of a tree. window: positions that a node sees, itself included; None: all."""
        depths, seen = tensors.depths, tensors.ancestors
        first = torch.full_like(depths, NO_WINDOW)
        if window is not None:
            seen = seen & (depths.unsqueeze(1) - depths < window)
            first = depths - window + 1
        bits = F.pad(seen, (0, -len(depths) % BITS)).unflatten(1, (-1, BITS)).long()
        words = (bits << torch.arange(BITS, device=bits.device)).sum(-1)
        start = torch.stack((first, torch.zeros_like(first)), 1)
        words = torch.cat((start, words), 1)
        return cls(words, sights(words), window is not None)

    def behind(self, length: Tensor | int) -> Tensor:
        """The mask int64 [n, 2 + w] of nodes behind `length` tokens, a number or int64 [1]."""
        words = self.words.clone()
        words[:, :FIXED].add_(length)
        return words


def sights(words: Tensor) -> Tensor:
    """words int64 [n, 2 + w] -> what nodes see, bool [n, 2 + 64 w] by place: the text, each node,
    what is behind them."""
    bits = words[:, FIXED:].unsqueeze(2) >> torch.arange(BITS, device=words.device)
    return F.pad(F.pad(((bits & 1) != 0).flatten(1), (1, 0), value=True), (0, 1))


def additive(
    words: Tensor, seen: Tensor, columns: Tensor, dtype: torch.dtype, has_window: bool = True
) -> Tensor:
    """A mask int64 [n, 2 + w] with its `sights` as numbers that are added to scores: 0 where a
    node sees a place, else -inf. columns int64 [s]: the places -> [n, s] of `dtype`. has_window:
    False saves operators where the whole text is seen."""
    beyond = columns - words[0, 1]
    visible = seen.index_select(1, (beyond + 1).clamp(0, seen.shape[1] - 1))
    if has_window:
        visible = visible & ((beyond >= 0) | (columns >= words[:, :1]))
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)
