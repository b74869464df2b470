"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.governor import Governor
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import ROOT, Choice, Tree
from medusa_chat.errors import UsageError

LogitHead = Callable[[Tensor], Tensor]
NGRAM = 4  # prompt lookup matches the last 4, 3, 2, then 1 tokens
LOOKUP_DEPTH = 10


@dataclass(frozen=True)
class TreeTensors:
    """A tree's constants on the device: parents, depths int64 [n] (the root's parent is 0),
    ancestors bool [n, n], paths int64 [n, depth + 1] (padded with the root)."""

    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    paths: Tensor

    @classmethod
    def of(cls, tree: Tree, device: torch.device) -> "TreeTensors":
        """The constants of `tree` on `device`."""
        padded = [[*path, *[0] * (tree.depth + 1 - len(path))] for path in tree.paths]
        return cls(
            torch.tensor([0, *tree.parents[1:]], device=device),
            torch.tensor(tree.depths, device=device),
            torch.tensor(tree.ancestors, device=device),
            torch.tensor(padded, device=device),
        )


@dataclass(frozen=True)
class Draft:
    """What is proposed: tokens int64 [n], tokens[0] the root, on the device; the tree's shape;
    probabilities float32 [n], the drafter's own (NaN at the root), or None."""

    tokens: Tensor
    tree: Tree
    tensors: TreeTensors
    probabilities: Tensor | None = None


class Drafter(Protocol):
    """Proposes a draft from what is certain."""

    name: str

    def propose(self, tokens: Sequence[int], root: Tensor, hidden: Tensor, depth: int) -> Draft:
        """tokens: every id certain since the last call, on the host, the root last (the prompt
        first). root int64 [1]: the same root on the device. hidden [1, d]: the backbone's state
        that gave it. depth: how deep the context lets the tree be."""
        ...

    def learn(self, path: Sequence[int]) -> None:
        """path: which nodes of the last draft stood, the root first."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"

    def __init__(self, device: torch.device) -> None:
        self._tensors = TreeTensors.of(ROOT, device)

    def propose(self, tokens: Sequence[int], root: Tensor, hidden: Tensor, depth: int) -> Draft:
        return Draft(root, ROOT, self._tensors)

    def learn(self, path: Sequence[int]) -> None:
        """Nothing: there was nothing to accept."""


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    Heads run at that one position, and only as many as the tree is deep. With a governor each
    step has as many of the tree's first nodes as it says, without one all. Raises UsageError when
    the tree is deeper than there are heads, or wider than the vocabulary.
    """

    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: LogitHead,
        tree: Tree,
        vocabulary: int,
        details: bool,
        governor: Governor | None = None,
    ) -> None:
        if tree.depth > len(heads):
            raise UsageError(
                f"the tree is {tree.depth} deep and the checkpoint has {len(heads)} heads: "
                f"choose a tree of depth {len(heads)} or less, or --tree auto"
            )
        if tree.width > vocabulary:
            raise UsageError(f"the tree needs {tree.width} predictions of {vocabulary} tokens")
        self.tree = tree
        self._heads, self._lm_head, self._details = heads, lm_head, details
        self._governor = governor
        self._length, self._nodes = -1, 1  # tokens in the cache; nodes of the last draft
        self._shapes: dict[tuple[int, int], tuple[Tree, TreeTensors, Tensor]] = {}

    def propose(self, tokens: Sequence[int], root: Tensor, hidden: Tensor, depth: int) -> Draft:
        self._length += len(tokens)
        nodes = self._governor.choose(self._length) if self._governor else len(self.tree)
        tree, tensors, index = self._shape(nodes, depth, root.device)
        self._nodes = len(tree)
        if len(tree) == 1:
            return Draft(root, tree, tensors)
        if self._heads.twin is not None:
            made = self._heads.twin.fill(hidden, tokens[-1], tree.depth, self.tree.width, index)
            if made is not None:
                return Draft(made[0], tree, tensors, made[1])
        logits = self._heads(hidden, self._lm_head, tree.depth)[:, 0]
        values, candidates, sums = self._heads.best(logits, self.tree.width)
        filled = torch.cat((root, candidates.flatten())).index_select(0, index)
        if not self._details:
            return Draft(filled, tree, tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        padded = torch.cat((shares.new_full((1,), torch.nan), shares))
        return Draft(filled, tree, tensors, padded.index_select(0, index))

    def learn(self, path: Sequence[int]) -> None:
        if self._governor is not None:
            self._governor.record(self._nodes, len(path), self._length)

    def _shape(
        self, nodes: int, depth: int, device: torch.device
    ) -> tuple[Tree, TreeTensors, Tensor]:
        """The first `nodes` nodes that are no deeper than `depth`; index [n] of each node in
        [root, candidates]."""
        depth = min(depth, self.tree.depth)
        if (nodes, depth) not in self._shapes:
            tree = self.tree.head(nodes).pruned(depth)
            places = zip(tree.depths, tree.ranks, strict=True)
            index = [0 if d == 0 else 1 + (d - 1) * self.tree.width + rank for d, rank in places]
            tensors = TreeTensors.of(tree, device)
            self._shapes[nodes, depth] = (tree, tensors, torch.tensor(index, device=device))
        return self._shapes[nodes, depth]


class PromptLookup:
    """Drafter "prompt-lookup": what followed the last few tokens earlier in the text, merged
    into one tree: longer matches first, then later ones. Needs no heads."""

    name = "prompt-lookup"

    def __init__(self, nodes: int) -> None:
        self.nodes = nodes
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places after it

    def propose(self, tokens: Sequence[int], root: Tensor, hidden: Tensor, depth: int) -> Draft:
        for token in tokens:
            self._append(token)
        found = self._merge(min(depth, LOOKUP_DEPTH))
        tree = Tree.from_choices(found)
        draft = torch.tensor([self._ids[-1], *found.values()], device=root.device)
        return Draft(draft, tree, TreeTensors.of(tree, root.device))

    def learn(self, path: Sequence[int]) -> None:
        """Nothing: what was wrong is not proposed because of it."""

    def _append(self, token: int) -> None:
        self._ids.append(token)
        for n in range(1, NGRAM + 1):
            if len(self._ids) >= n:
                self._ends.setdefault(tuple(self._ids[-n:]), []).append(len(self._ids))

    def _merge(self, depth: int) -> dict[Choice, int]:
        """Choice -> token, parents first, at most nodes - 1 of them."""
        found: dict[Choice, int] = {}
        children: dict[Choice, dict[int, Choice]] = {}
        for start in self._matches():
            at: Choice = ()
            for token in self._ids[start : start + depth]:
                known = children.setdefault(at, {})
                if token not in known:
                    if len(found) >= self.nodes - 1:
                        return found
                    known[token] = (*at, len(known))
                    found[known[token]] = token
                at = known[token]
        return found

    def _matches(self) -> list[int]:
        """Places after earlier occurrences of the last tokens: longest n-gram, then latest."""
        places: dict[int, None] = {}
        for n in range(min(NGRAM, len(self._ids)), 0, -1):
            ends = self._ends.get(tuple(self._ids[-n:]), [])
            places |= dict.fromkeys(end for end in reversed(ends[-64:]) if end < len(self._ids))
        return list(places)
