"""Beam: the nodes of one level of a draft that are read together, and their children.

All of it stays on the device, so that a level needs nothing of the host: which children are read
next, and which nodes each of them sees.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from medusa_chat.decoding.drafters.own_layers import WIDTH, Names


@dataclass(frozen=True)
class Beam:
    """f nodes of a level. tokens int64 [f]. reached float32 [f]: the logarithm of the probability
    of each one's path. seen bool [f, b]: which of the b nodes behind the root that are read so far,
    these last, lie on each one's path. states [f, w]: what their parents' pass left, None where it
    leaves nothing."""

    tokens: Tensor
    reached: Tensor
    seen: Tensor
    states: Tensor | None = None

    @classmethod
    def of_root(cls, root: Tensor, states: Tensor | None = None) -> "Beam":
        """The root, int64 [1]."""
        reached = torch.zeros(1, device=root.device)
        return cls(root, reached, torch.zeros(1, 0, dtype=torch.bool, device=root.device), states)


# of a beam, and its level from 0 for the root -> log probabilities float32 [f, V_d], or [1, V_d]
# where they are the same for all, and what the pass leaves for the children [f, w] or None
Read = Callable[[Beam, int], tuple[Tensor, Tensor | None]]


@dataclass(frozen=True)
class Children:
    """The best tokens after each node of a beam, in the ids of the backbone int64 [f, W], and their
    shares float32 [f, W], falling."""

    beam: Beam
    ids: Tensor
    shares: Tensor
    states: Tensor | None

    @classmethod
    def of(cls, beam: Beam, level: int, read: Read, names: Names) -> "Children":
        """Read a beam."""
        scores, states = read(beam, level)
        ids, shares = names.best(scores)
        size = len(beam.tokens), -1
        return cls(beam, ids.expand(size), shares.expand(size), states)

    @property
    def words(self) -> Tensor:
        """The ids, then the shares, float32 [2, f, W]: float32 has all integers below 2 ** 24."""
        return torch.stack((self.ids.float(), self.shares))

    def likely(self) -> Tensor:
        """Places [k] in [f * W] of those whose paths are the most probable, at most WIDTH."""
        reached = (self.beam.reached[:, None] + self.shares.log()).flatten()
        return reached.topk(min(WIDTH, len(reached))).indices

    def chosen(self, places: Tensor) -> Beam:
        """The beam of the children at these places, int64 [k] in [f * W]."""
        beam, states = self.beam, self.states
        parents = places // self.ids.shape[1]
        own = torch.eye(len(places), dtype=torch.bool, device=places.device)
        return Beam(
            self.ids.flatten().index_select(0, places),
            beam.reached.index_select(0, parents)
            + self.shares.flatten().index_select(0, places).log(),
            torch.cat((beam.seen.index_select(0, parents), own), 1),
            None if states is None else states.index_select(0, parents),
        )


def all_levels(root: Beam, levels: int, read: Read, names: Names) -> Tensor:
    """Levels of a draft, each the most probable nodes of the last one, without the host between
    them. Of each its `Children.words` and, but for the last one, the places of those that the next
    level reads: float32 [w], see `split`."""
    beam, words = root, list[Tensor]()
    for level in range(levels):
        children = Children.of(beam, level, read, names)
        words.append(children.words.flatten())
        if level < levels - 1:
            places = children.likely()
            words.append(places.float())
            beam = children.chosen(places)
    return torch.cat(words)


def split(words: list[float], levels: int, width: int) -> list[tuple[list[list[float]], list[int]]]:
    """The words of `all_levels` of nodes with `width` children each -> of each level the rows of
    ids, then of shares, and the places of those that the next one reads."""
    found, at, count = [], 0, 1
    for level in range(levels):
        end = at + 2 * count * width
        rows = [words[n : n + width] for n in range(at, end, width)]
        count = min(WIDTH, count * width) if level < levels - 1 else 0
        found.append((rows, [int(place) for place in words[end : end + count]]))
        at = end + count
    return found


def tree_mask(seen: Tensor, behind: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask [f, s] of nodes that see the whole text and, of the nodes behind it, those
    in seen bool [f, b]. behind int64 [s]: of each place how far it lies behind the text's end."""
    padded = F.pad(F.pad(seen, (1, 0), value=True), (0, 1))
    visible = padded.index_select(1, (behind + 1).clamp(0, seen.shape[1] + 1))
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, -torch.inf)
