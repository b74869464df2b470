"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root.

The others are in medusa.py and prompt_lookup.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.candidate_budget import Grower
from medusa_chat.decoding.tree import ROOT, Tree


@dataclass(frozen=True)
class TreeTensors:
    """A tree's constants on the device: parents, depths int64 [n] (the root's parent is 0),
    ancestors bool [n, n], paths int64 [n, depth + 1] (padded with the root)."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    paths: Tensor

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, tree: Tree, device: torch.device) -> "TreeTensors":
        """The constants of `tree` on `device`, the same ones for the same tree: answers are short,
        and what is kept ready for a tree is found by them."""
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        return cls(
            torch.tensor([0, *tree.parents[1:]], device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.ancestors, device=device),
            torch.tensor(padded, device=device),
        )

    def part(self, kept: Tensor) -> "TreeTensors":
        """Of the nodes `kept` [m], rising, with every parent among them: their own constants, the
        paths padded to what they were."""
        places = torch.zeros_like(self.parents)
        places[kept] = torch.arange(len(kept), device=kept.device)
        return TreeTensors(
            places[self.parents[kept]],
            self.depths[kept],
            self.ancestors[kept][:, kept],
            places[self.paths[kept]],
        )


@dataclass(frozen=True)
class Draft:
    """What is proposed: tokens int64 [n], tokens[0] the root, on the device; the tree's shape;
    probabilities float32 [n], the drafter's own (NaN at the root), or None; guesses: see
    DraftRecord."""

    tokens: Tensor
    tree: Tree
    tensors: TreeTensors
    probabilities: Tensor | None = None
    guesses: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class Plan:
    """What the next draft will be, as far as the host can say: its tree; the tokens of all nodes,
    the root first, or where the heads are to say them, index int64 [n]: each node's place in
    [root, the `width` best guesses of the first head, of the second, ...]. grower: who decides
    which of these nodes are drafted, and with asks that it is the usual number; None: all are.
    least: the certainty from which on that of the next root is wanted; 0: never. is_lasting:
    whether the plans after it are the same, but for the root, while the text has room for them."""

    tree: Tree
    tensors: TreeTensors
    tokens: Sequence[int] | None
    index: Tensor | None = None
    width: int = 0
    grower: Grower | None = None
    asks: bool = False
    least: float = 0.0
    is_lasting: bool = False


class Drafter(Protocol):
    """Proposes a draft from what is certain: what it will be, then its tokens."""

    name: str
    least: float  # see Plan

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
        """tokens: every id certain since the last call, on the host, the root last (the prompt
        first). depth: how deep the context lets the tree be. certainty: the backbone's
        of the root (acceptance.py), 0 for anything under `least` and where it was not wanted. The
        plan before it is done with: it may be the same one."""
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1]: the root on the device. hidden [1, d]: the backbone's state that gave
        it."""
        ...

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """nodes: of the last draft; path: which of them stood, the root first. Not called for what
        a grower decided in a step that was one call."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"
    least = 0.0

    def __init__(self, device: torch.device) -> None:
        self._tensors = TreeTensors.of(ROOT, device)

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
        return Plan(ROOT, self._tensors, tokens[-1:], is_lasting=True)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        return Draft(root, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Nothing: there was nothing to accept."""
