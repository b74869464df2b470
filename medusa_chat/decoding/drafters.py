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
        """The constants of `tree` on `device`, cached: callers find what they prepared for a tree
        by the identity of this object."""
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        return cls(
            torch.tensor([0, *tree.parents[1:]], device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.ancestors, device=device),
            torch.tensor(padded, device=device),
        )

    def part(self, kept: Tensor) -> "TreeTensors":
        """The constants of the subtree of the nodes `kept` int64 [m], in rising order, which must
        contain every node's parent; paths keep their width, [m, depth + 1]."""
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
    """A proposal: tokens int64 [n] on the device, tokens[0] the root; the tree and its constants;
    probabilities float32 [n] by the drafter (NaN at the root), or None; guesses: see DraftRecord.
    """

    tokens: Tensor
    tree: Tree
    tensors: TreeTensors
    probabilities: Tensor | None = None
    guesses: tuple[tuple[int, ...], ...] = ()


@dataclass(slots=True, eq=False)
class Plan:
    """The next draft as far as the host knows it.

    tokens: of all nodes, the root first, where the host knows them. Else index int64 [n]: each
    node's place in [root, the `width` best guesses of the first head, of the second, ...].
    grower: decides which of the nodes are drafted; None: all are. asks: the grower drafts its
    usual number. least: the next root's certainty is computed where it is at least this; 0: never.
    is_lasting: the following plans are the same but for the root, while the context has room.
    """

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
    """Proposes drafts in two calls: `plan` on the host, then `fill` with the tokens on the
    device."""

    name: str
    least: float  # see Plan

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
        """The plan of the next draft; it may be the same object as the last one, changed.

        tokens: the ids added to the text since the last call (at first the prompt), the root last.
        depth: the largest that the context has room for. certainty: the backbone's of the root
        (Verifier.certainty), 0 where under `least` or not computed.
        """
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The draft of `plan`. root int64 [1], on the device; hidden [1, d]: the backbone's state
        from which the root was predicted."""
        ...

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Account for the last step: its number of nodes, and the accepted ones, the root first.
        Not called where WholeStep has done a grower's accounting."""
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
        """root int64 [1] alone; hidden [1, d] is not read."""
        return Draft(root, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: there is no draft to learn from."""
