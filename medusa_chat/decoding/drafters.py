"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
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


@dataclass(frozen=True)
class Draft:
    """What is proposed: tokens int64 [n], tokens[0] the root, on the device; the tree's shape;
    probabilities float32 [n], the drafter's own (NaN at the root), or None."""

    tokens: Tensor
    tree: Tree
    tensors: TreeTensors
    probabilities: Tensor | None = None


@dataclass(frozen=True)
class Plan:
    """What the next draft will be, as far as the host can say: its tree; the tokens of all nodes,
    the root first, or where the heads are to say them, index int64 [n]: each node's place in
    [root, the `width` best guesses of the first head, of the second, ...]."""

    tree: Tree
    tensors: TreeTensors
    tokens: Sequence[int] | None
    index: Tensor | None = None
    width: int = 0


class Drafter(Protocol):
    """Proposes a draft from what is certain: what it will be, then its tokens."""

    name: str

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        """tokens: every id certain since the last call, on the host, the root last (the prompt
        first). depth: how deep the context lets the tree be."""
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1]: the root on the device. hidden [1, d]: the backbone's state that gave
        it."""
        ...

    def learn(self, path: Sequence[int]) -> None:
        """path: which nodes of the last draft stood, the root first."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"

    def __init__(self, device: torch.device) -> None:
        self._tensors = TreeTensors.of(ROOT, device)

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return Plan(ROOT, self._tensors, tokens[-1:])

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        return Draft(root, plan.tree, plan.tensors)

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
        self.tree, self._deepest = tree, tree.depth
        self._heads, self._lm_head, self._details = heads, lm_head, details
        self._governor = governor
        self._length, self._nodes = -1, 1  # tokens in the cache; nodes of the last draft
        self._plans: dict[tuple[int, int], Plan] = {}

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._length += len(tokens)
        nodes = self._governor.choose(self._length) if self._governor else len(self.tree)
        made = self._shape(nodes, depth)
        self._nodes = len(made.tree)
        if self._nodes > 1:
            return made
        return Plan(made.tree, made.tensors, tokens[-1:])

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        depth, width = plan.tree.depth, plan.width
        logits, names = self._heads.draft_logits(hidden, self._lm_head, depth, width)
        values, candidates, sums = self._heads.best(logits, width)
        candidates = candidates if names is None else names[candidates]
        filled = torch.cat((root, candidates.flatten())).index_select(0, plan.index)
        if not self._details:
            return Draft(filled, plan.tree, plan.tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        padded = torch.cat((shares.new_full((1,), torch.nan), shares))
        return Draft(filled, plan.tree, plan.tensors, padded.index_select(0, plan.index))

    def learn(self, path: Sequence[int]) -> None:
        if self._governor is not None:
            self._governor.record(self._nodes, len(path), self._length)

    def _shape(self, nodes: int, depth: int) -> Plan:
        deep = min(depth, self._deepest)
        found = self._plans.get((nodes, deep))
        if found is None:
            device = self._heads.bias.device
            found = self._plans[nodes, deep] = _medusa_plan(self.tree, nodes, deep, device)
        return found


@lru_cache(maxsize=32)
def _medusa_plan(tree: Tree, nodes: int, depth: int, device: torch.device) -> Plan:
    """The first `nodes` nodes that are no deeper than `depth`."""
    cut, width = tree.head(nodes).pruned(depth), tree.width
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * width + rank for d, rank in places]
    found = torch.tensor(index, device=device) if len(cut) > 1 else None
    return Plan(cut, TreeTensors.of(cut, device), None, found, width)


class PromptLookup:
    """Drafter "prompt-lookup": what followed the last few tokens earlier in the text, merged
    into one tree: longer matches first, then later ones. Needs no heads."""

    name = "prompt-lookup"

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places after it

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        for token in tokens:
            self._append(token)
        found = self._merge(min(depth, LOOKUP_DEPTH))
        tree = Tree.from_choices(found)
        made = [self._ids[-1], *found.values()]
        return Plan(tree, TreeTensors.of(tree, self._device), made)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        draft = torch.tensor(plan.tokens, device=self._device)
        return Draft(draft, plan.tree, plan.tensors)

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
