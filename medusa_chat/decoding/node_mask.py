"""Node masks: what each node of a draft sees of the text and of the draft, in 64-bit words.

A mask is int64 [n, 2 + w] for n nodes, w = ceil(n / 64): in each row the first place of the text
that the node sees, the length of the text, and a bit for each node of the draft that it sees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.drafters import TreeTensors

BITS = 64
FIXED = 2  # numbers before the words
NO_WINDOW = -(2**40)  # as the first place: before every text


@dataclass(frozen=True)
class NodeMask:
    """The mask of a tree behind texts of any length: words [n, 2 + w] as for length 0, and moves
    [2 + w], 1 where a number grows with the length."""

    words: Tensor
    moves: Tensor

    @classmethod
    def of(cls, tensors: TreeTensors, window: int | None) -> "NodeMask":
        """window: positions that a node sees, itself included; None: all."""
        depths, seen = tensors.depths, tensors.ancestors
        first = torch.full_like(depths, NO_WINDOW)
        if window is not None:
            seen = seen & (depths.unsqueeze(1) - depths < window)
            first = depths - window + 1
        bits = F.pad(seen, (0, -len(depths) % BITS)).unflatten(1, (-1, BITS)).long()
        words = (bits << torch.arange(BITS, device=bits.device)).sum(-1)
        start = torch.stack((first, torch.zeros_like(first)), 1)
        moves = torch.arange(FIXED + words.shape[1], device=words.device) < FIXED
        return cls(torch.cat((start, words), 1), moves.long())

    def behind(self, length: Tensor | int) -> Tensor:
        """The mask [n, 2 + w] of nodes behind `length` tokens, a number or int64 [1]."""
        return self.words + self.moves * length


def sights(words: Tensor) -> Tensor:
    """What nodes see, bool [n, 2 + 64 w] by place: the text, each node, what is behind them."""
    bits = words[:, FIXED:].unsqueeze(2) >> torch.arange(BITS, device=words.device)
    return F.pad(F.pad(((bits & 1) != 0).flatten(1), (1, 0), value=True), (0, 1))


def additive(
    words: Tensor, seen: Tensor, columns: Tensor, dtype: torch.dtype, has_window: bool = True
) -> Tensor:
    """A mask [n, 2 + w] with its `sights` as numbers that are added to scores: 0 where a node sees
    a place, else -inf. columns int64 [s]: the places -> [n, s]. has_window: False saves operators
    where the whole text is seen."""
    beyond = columns - words[0, 1]
    found = seen.index_select(1, (beyond + 1).clamp(0, seen.shape[1] - 1))
    if has_window:
        found = found & ((beyond >= 0) | (columns >= words[:, :1]))
    mask = torch.zeros(found.shape, dtype=dtype, device=found.device)
    return mask.masked_fill_(~found, -torch.inf)
