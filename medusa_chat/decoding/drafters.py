"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.governor import Governor
from medusa_chat.decoding.grower import CERTAIN, Grower
from medusa_chat.decoding.growth import Growth, grow, subtree
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
    @lru_cache(maxsize=256)
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
    [root, the `width` best guesses of the first head, of the second, ...]. growth: what decides
    which of these nodes are drafted; None: all. least: from which
    probability of the next root on whoever makes the next draft is to know it; 0: nobody asks."""

    tree: Tree
    tensors: TreeTensors
    tokens: Sequence[int] | None
    index: Tensor | None = None
    width: int = 0
    growth: Growth | None = None
    least: float = 0.0


class Drafter(Protocol):
    """Proposes a draft from what is certain: what it will be, then its tokens."""

    name: str
    least: float  # see Plan

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 1.0) -> Plan:
        """tokens: every id certain since the last call, on the host, the root last (the prompt
        first). depth: how deep the context lets the tree be. certainty: the backbone's
        probability of the root, 0 for anything under `least`."""
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1]: the root on the device. hidden [1, d]: the backbone's state that gave
        it."""
        ...

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """nodes: of the last draft; path: which of them stood, the root first."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"
    least = 0.0

    def __init__(self, device: torch.device) -> None:
        self._tensors = TreeTensors.of(ROOT, device)

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 1.0) -> Plan:
        return Plan(ROOT, self._tensors, tokens[-1:])

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        return Draft(root, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Nothing: there was nothing to accept."""


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    Heads run at that one position, and only as many as the tree is deep. With a governor each
    step has as many of the tree's first nodes as it says, with a grower those of its candidates
    that the heads are sure of; without either all. Raises UsageError when the tree is deeper than
    there are heads, or wider than the vocabulary.
    """

    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        lm_head: LogitHead,
        tree: Tree,
        vocabulary: int,
        details: bool,
        governor: Governor | Grower | None = None,
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
        self._governor = None if isinstance(governor, Grower) else governor
        self._grower = governor if isinstance(governor, Grower) else None
        self.least = CERTAIN if self._grower is not None else 0.0
        if self._grower is not None:
            self._grower.begin()
        self._length, self._is_drafted = -1, False  # tokens in the cache; whether heads ran
        self._plans: dict[tuple[int, int], Shape] = {}
        root = TreeTensors.of(ROOT, heads.bias.device)
        self._alone = Plan(ROOT, root, None, least=self.least)

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 1.0) -> Plan:
        self._length += len(tokens)
        if self._grower is not None:
            made = self._grown(self._grower, depth, certainty)
        else:
            nodes = self._governor.choose(self._length) if self._governor else len(self.tree)
            made = Plan(*self._shape(self.tree, nodes, depth))
        self._is_drafted = len(made.tree) > 1
        if not self._is_drafted:
            made.tokens = tokens[-1:]
        return made

    def _grown(self, grower: Grower, depth: int, certainty: float) -> Plan:
        """The candidates, with what decides which are drafted; the root alone for none."""
        growth = grower.growth(self._length, certainty)
        if growth is None:
            return self._alone
        whole = self._shape(grower.candidates, len(grower.candidates), depth)
        return Plan(*whole, growth, self.least)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        values, candidates, sums = self._guesses(hidden, plan)
        filled = torch.cat((root, candidates.flatten())).index_select(0, plan.index)
        if not self._details and plan.growth is None:
            return Draft(filled, plan.tree, plan.tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        padded = torch.cat((shares.new_full((1,), torch.nan), shares)).index_select(0, plan.index)
        whole = Draft(filled, plan.tree, plan.tensors, padded)
        if plan.growth is None:
            return whole
        guesses = tuple(map(tuple, candidates.tolist())) if self._details else ()
        if shares[0] < plan.growth.gate:
            return Draft(root, ROOT, TreeTensors.of(ROOT, root.device), padded[:1], guesses[:1])
        return _part(whole, plan.growth, guesses)

    def _guesses(self, hidden: Tensor, plan: Plan) -> tuple[Tensor, Tensor, Tensor]:
        """Of every head of the plan: values and tokens [K, width], and log(sum(exp)) [K]."""
        depth, width = plan.tree.depth, plan.width
        logits, names = self._heads.draft_logits(hidden, self._lm_head, depth, width)
        values, places, sums = self._heads.best(logits, width)
        return values, places if names is None else names[places], sums

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self._governor is not None:
            self._governor.record(nodes, len(path), self._length)
        if self._grower is not None and self._is_drafted:
            self._grower.record(nodes, len(path))

    def _shape(self, tree: Tree, nodes: int, depth: int) -> "Shape":
        deep = min(depth, tree.depth)
        found = self._plans.get((nodes, deep))
        if found is None:
            device = self._heads.bias.device
            found = self._plans[nodes, deep] = _shape_of(tree, nodes, deep, device)
        return found


def _part(whole: Draft, growth: Growth, guesses: tuple[tuple[int, ...], ...]) -> Draft:
    """What of a draft the heads are sure of."""
    assert whole.probabilities is not None
    nodes = grow(whole.tree, whole.probabilities.tolist(), growth)
    tree, device = subtree(whole.tree, nodes), whole.tokens.device
    kept = torch.tensor(nodes, device=device)
    tokens, shares = (t.index_select(0, kept) for t in (whole.tokens, whole.probabilities))
    return Draft(tokens, tree, TreeTensors.of(tree, device), shares, guesses)


Shape = tuple[Tree, TreeTensors, None, Tensor | None, int]  # what stays the same of a Plan


@lru_cache(maxsize=32)
def _shape_of(tree: Tree, nodes: int, depth: int, device: torch.device) -> Shape:
    """The first `nodes` nodes that are no deeper than `depth`."""
    cut, width = tree.head(nodes).pruned(depth), tree.width
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * width + rank for d, rank in places]
    found = torch.tensor(index, device=device) if len(cut) > 1 else None
    return cut, TreeTensors.of(cut, device), None, found, width


class PromptLookup:
    """Drafter "prompt-lookup": what followed the last few tokens earlier in the text, merged
    into one tree: longer matches first, then later ones. Needs no heads."""

    name = "prompt-lookup"
    least = 0.0

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self._ids: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> places after it

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 1.0) -> Plan:
        for token in tokens:
            self._append(token)
        found = self._merge(min(depth, LOOKUP_DEPTH))
        tree = Tree.from_choices(found)
        made = [self._ids[-1], *found.values()]
        return Plan(tree, TreeTensors.of(tree, self._device), made)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        draft = torch.tensor(plan.tokens, device=self._device)
        return Draft(draft, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
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
