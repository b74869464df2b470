"""Draft and Plan: what a step proposes, and what the host knows of it; drafters without heads."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.budget import BOTH, WHOLE, Budget
from medusa_chat.decoding.continuation import Continuation
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import ROOT, Tree


@dataclass(frozen=True, eq=False)
class TreeTensors:
    """A tree and its constants on the device: parents, depths int64 [n] (the root's parent is 0);
    ancestors bool [n, n]: whether the row's node sees the column's; others bool [n, n]: whether the
    column's node is not on the path from the root's child to the row's node; paths int64
    [n, depth + 1]: the path to each node, padded with the root."""

    tree: Tree
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    others: Tensor
    paths: Tensor

    @classmethod
    @lru_cache(maxsize=32)
    def of(cls, tree: Tree, device: torch.device) -> "TreeTensors":
        """The constants of `tree` on `device`, cached: callers use the identity of this object as a
        key for what they prepared for the tree."""
        ancestors = torch.tensor(tree.ancestors, device=device)
        others = ancestors.logical_not()
        others[:, :1] = True
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        rows = [0, *tree.parents[1:]], tree.depths, padded
        parents, depths, paths = (torch.tensor(row, device=device) for row in rows)
        return cls(tree, parents, depths, ancestors, others, paths)


@dataclass(frozen=True)
class Draft:
    """A proposal. tokens: int64 [n] on the device, the root first. tensors: its tree. shares: the
    heads' probabilities [n] (undefined for other sources), float32 on the device or on the host, or
    None. guesses, sources: see DraftRecord."""

    tokens: Tensor
    tensors: TreeTensors
    shares: Tensor | Sequence[float] | None = None
    guesses: tuple[tuple[int, ...], ...] = ()
    sources: tuple[Source | None, ...] = ()

    @property
    def tree(self) -> Tree:
        return self.tensors.tree


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The next draft as far as the host knows it.

    index int64 [n]: each node's place in [root, the `width` best guesses of the first of `heads`
    heads, of the second, ..., text]; None: the root alone. text int64 [t]: tokens from
    `Drafter.plan`, on the device. is_grown: `fill` selects some of the nodes, by numbers that it
    reads on the host. reason: why it has this many nodes (budget.py). sources: see DraftRecord.
    """

    tensors: TreeTensors
    index: Tensor | None = None
    width: int = 0
    is_grown: bool = False
    reason: str = ""
    heads: int = 0
    text: Tensor | None = None
    sources: tuple[Source | None, ...] = ()

    @property
    def tree(self) -> Tree:
        return self.tensors.tree


def text_draft(plan: Plan, root: Tensor) -> Draft:
    """The draft of a plan without heads: root int64 [1], then the text's tokens, if any."""
    tokens = root if plan.text is None else torch.cat((root, plan.text))
    return Draft(tokens, plan.tensors, sources=plan.sources)


@lru_cache(maxsize=64)
def indexed(
    tree: Tree, nodes: int, depth: int, device: torch.device
) -> tuple[TreeTensors, Tensor | None]:
    """The first `nodes` nodes no deeper than `depth`, and their Plan.index: int64 [n], None if only
    the root is left."""
    cut = tree.head(nodes).pruned(depth)
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * tree.width + rank for d, rank in places]
    tensors = TreeTensors.of(cut, device)
    return tensors, torch.tensor(index, device=device) if len(cut) > 1 else None


def with_chain(
    tree: Tree, nodes: int, depth: int, tokens: Sequence[int], device: torch.device
) -> Plan:
    """The plan of the first `nodes` nodes no deeper than `depth`, which heads fill, with a chain of
    the text's tokens below the root. Chains of one length share the tensor `text`, which recorded
    steps read."""
    made = _with_chain(tree, nodes, depth, len(tokens), device)
    assert made.text is not None
    made.text.copy_(torch.tensor(tokens))
    return made


@lru_cache(maxsize=128)
@torch.inference_mode(False)  # its `text` is written everywhere, also in training
def _with_chain(tree: Tree, nodes: int, depth: int, count: int, device: torch.device) -> Plan:
    tensors, index = indexed(tree, nodes, depth, device)
    heads = tensors.tree
    own, width = len(heads), tree.width
    parents, ranks = (0, *range(own, own + count - 1)), (width, *[0] * (count - 1))
    root = torch.zeros(1, dtype=torch.long, device=device)
    by_heads: list[Source] = ["heads"] * (own - 1)
    by_text: list[Source] = ["text"] * count
    places = 1 + heads.depth * width + torch.arange(count, device=device)
    return Plan(
        shape_of((*heads.parents, *parents), (*heads.ranks, *ranks), device),
        index=torch.cat((root if index is None else index, places)),
        width=width,
        reason=BOTH,
        heads=heads.depth,
        text=torch.zeros(count, dtype=torch.long, device=device),
        sources=(None, *by_heads, *by_text),
    )


@lru_cache(maxsize=512)
def shape_of(parents: tuple[int, ...], ranks: tuple[int, ...], device: torch.device) -> TreeTensors:
    """The constants of a tree made for one step; a few shapes recur."""
    return TreeTensors.of(Tree(parents, ranks), device)


class Drafter(Protocol):
    """Proposes drafts in two calls: `plan` on the host, then `fill` with the tokens on the
    device."""

    name: str

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        """The plan of the next draft.

        tokens: the ids added to the text since the last call (first the prompt), the root last.
        depth: the largest depth that the context has room for.
        """

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """The draft of `plan`. root int64 [1], on the device; hidden [1, d]: the backbone's hidden
        state that predicted the root; details: whether the draft has probabilities."""

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Record the last step: its number of nodes, and the accepted ones, the root first."""


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name, why = "none", "off: plain decoding"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._root = Plan(TreeTensors.of(ROOT, device), reason=self.why)

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return self._root

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """root int64 [1], the planned tokens after it; hidden [1, d] is not read."""
        return text_draft(plan, root)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: the hit rates of matches are counted for every token, drafted or not."""


class PromptLookup(Autoregressive):
    """Drafter "prompt-lookup": a chain of the tokens that followed an earlier occurrence of the
    text's last tokens: `nodes` including the root (at most DEPTH + 1), or as a budget allows."""

    name, why = "prompt-lookup", "off: no match"

    def __init__(self, nodes: int, device: torch.device, budget: Budget | None = None) -> None:
        super().__init__(device)
        self.nodes, self.budget, self._text = nodes, budget, Continuation()
        self._is_drafted = False  # whether the last step had a draft

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        chain, reason = self._follow(min(self.nodes - 1, depth))
        self._is_drafted = bool(chain)
        if not chain:
            return replace(self._root, reason=reason)
        return replace(with_chain(ROOT, 1, 0, chain, self._device), reason=reason, sources=())

    def _follow(self, depth: int) -> tuple[Sequence[int], str]:
        """(the next tokens according to the text, the reason for their number)."""
        if self.budget is None:
            tokens = self._text.following(depth)
            return tokens, WHOLE if tokens else self.why
        guess = self._text.guess(depth)
        allowed = self.budget.allow(guess.reached if guess else ())
        return (guess.tokens[: allowed.nodes - 1], allowed.reason) if guess else ((), self.why)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self.budget is not None:
            self.budget.record(nodes, len(path), self._is_drafted, 1)
