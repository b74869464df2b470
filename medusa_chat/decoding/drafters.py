"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root.

PromptLookup needs no heads either; the others are in medusa.py and combined.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.continuation import Continuation
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import ROOT, Choice, Tree


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """A tree's constants on the device: parents, depths int64 [n] (the root's parent is 0),
    ancestors bool [n, n]: whether a row's node sees a column's; others bool [n, n]: whether the
    path from the root's child to a row's node is without a column's; paths int64 [n, depth + 1]:
    to each node, padded with the root."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    others: Tensor
    paths: Tensor

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, tree: Tree, device: torch.device) -> "TreeTensors":
        """The constants of `tree` on `device`, cached: callers find what they prepared for a tree
        by the identity of this object."""
        ancestors = torch.tensor(tree.ancestors, device=device)
        others = ancestors.logical_not()
        others[:, :1] = True
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        rows = [0, *tree.parents[1:]], tree.depths, padded
        parents, depths, paths = (torch.tensor(row, device=device) for row in rows)
        return cls(parents, depths, ancestors, others, paths)


@dataclass(frozen=True)
class Draft:
    """A proposal: tokens int64 [n] on the device, tokens[0] the root; the tree and its constants;
    shares: probabilities [n] by the heads (any number where they did not draft), float32 on the
    device or on the host, or None; guesses, sources: see DraftRecord.
    """

    tokens: Tensor
    tree: Tree
    tensors: TreeTensors
    shares: Tensor | Sequence[float] | None = None
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The next draft as far as the host knows it.

    tokens: of all nodes, the root first, where the host knows them. Else index int64 [n]: each
    node's place in [root, the `width` best guesses of the first of `heads` heads, of the second,
    ..., text]; None: the root alone. text int64 [t]: tokens that `Drafter.plan` puts there, on the
    device. is_grown: `fill` keeps a part of the nodes, by numbers that it reads on the host.
    reason: why so many nodes (draft_budget.py). sources: see DraftRecord.
    """

    tree: Tree
    tensors: TreeTensors
    tokens: Sequence[int] | None = None
    index: Tensor | None = None
    width: int = 0
    is_grown: bool = False
    reason: str = ""
    heads: int = 0
    text: Tensor | None = None
    sources: tuple[Source | None, ...] = ()


def known_draft(plan: Plan, device: torch.device) -> Draft:
    """The draft of a plan with `tokens`."""
    tokens = torch.tensor(plan.tokens, device=device)
    return Draft(tokens, plan.tree, plan.tensors, sources=plan.sources)


class Drafter(Protocol):
    """Proposes drafts in two calls: `plan` on the host, then `fill` with the tokens on the
    device."""

    name: str

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        """The plan of the next draft.

        tokens: the ids added to the text since the last call (at first the prompt), the root last.
        depth: the largest that the context has room for.
        """
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The draft of `plan`. root int64 [1], on the device; hidden [1, d]: the backbone's state
        from which the root was predicted."""
        ...

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Account for the last step: its number of nodes, and the accepted ones, the root first."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"

    def __init__(self, device: torch.device) -> None:
        self._plan = Plan(ROOT, TreeTensors.of(ROOT, device), reason="off: plain decoding")

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return self._plan

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1] alone; hidden [1, d] is not read."""
        return Draft(root, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: there is no draft to learn from."""


class PromptLookup:
    """Drafter "prompt-lookup": what followed the last tokens earlier in the text, merged into one
    tree of at most `nodes` nodes."""

    name = "prompt-lookup"

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self._text = Continuation()

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        found = self._merged(depth)
        tree = Tree.from_choices(found)
        made = [tokens[-1], *found.values()]
        reason = "all" if found else "off: no match"
        return Plan(tree, TreeTensors.of(tree, self._device), made, reason=reason)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The planned tokens int64 [n]; root [1] and hidden [1, d] are not read."""
        return known_draft(plan, self._device)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: a match is proposed again however often it was refused."""

    def _merged(self, depth: int) -> dict[Choice, int]:
        """Choice -> token, parents first, at most nodes - 1 of them."""
        found: dict[Choice, int] = {}
        children: dict[Choice, dict[int, Choice]] = {}
        for continuation in self._text.continuations(depth):
            at: Choice = ()
            for token in continuation:
                known = children.setdefault(at, {})
                if token not in known:
                    if len(found) >= self.nodes - 1:
                        return found
                    known[token] = (*at, len(known))
                    found[known[token]] = token
                at = known[token]
        return found
