"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, Self

import torch
from torch import Tensor

from medusa_chat.decoding.governor import Governor
from medusa_chat.decoding.grower import Grower
from medusa_chat.decoding.growth import ASKED_EVERY, Growth, grow, subtree
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
        of the root (acceptance.py), 0 for anything under `least` and where it was not wanted."""
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
        self._governor = None if isinstance(governor, Grower) else governor
        self._grower = governor if isinstance(governor, Grower) else None
        _require_drawable(self._grower.candidates if self._grower else tree, heads, vocabulary)
        self._device = heads.bias.device
        self.tree = tree
        self._heads, self._lm_head, self._details = heads, lm_head, details
        self.least = self._grower.certain if self._grower is not None else 0.0
        self._length, self._certainty = -1, 0.0  # tokens in the cache, and the root's probability
        self._is_drafted = False  # whether heads ran
        self._steps = 0  # that were planned
        self._plans: dict[tuple[int, int], Shape] = {}
        self._alone = TreeTensors.of(ROOT, self._device)

    def is_of(
        self,
        heads: MedusaHeads,
        tree: Tree,
        details: bool,
        governor: Governor | Grower | None,
    ) -> bool:
        """Whether one of these would be the same."""
        is_same = self._heads is heads and self._details == details and self.tree == tree
        return is_same and (self._grower or self._governor) is governor

    def anew(self) -> Self:
        """The same before its first step: an answer may be over in less time than it takes to make
        one."""
        found = object.__new__(type(self))
        found.__dict__.update(self.__dict__)
        return found

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
        self._length += len(tokens)
        self._steps += 1
        self._certainty = certainty
        grower = self._grower
        if grower is not None and self._steps == 1:
            grower.begin()
        nodes = self._governor.choose(self._length) if self._governor else len(self.tree)
        tree, nodes = (grower.candidates, len(grower.candidates)) if grower else (self.tree, nodes)
        made = Plan(*self._shape(tree, nodes, depth), least=self.least)
        self._is_drafted = len(made.tree) > 1
        if not self._is_drafted:
            made.tokens = tokens[-1:]
        elif grower is not None:
            made.grower = grower
            made.asks = self._details and self._steps % ASKED_EVERY == 0
        is_fixed = self._governor is None or len(self.tree) == 1
        made.is_lasting = is_fixed and not made.asks
        return made

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        growth = self._growth(plan)
        if plan.grower is not None and growth is None:
            self._is_drafted = False
            return Draft(root, ROOT, self._alone)
        alone = self._unsure(plan, growth, root, hidden) if growth else None
        if alone is not None:
            return alone
        values, candidates, sums = self._guesses(hidden, plan, plan.tree.depth)
        filled = torch.cat((root, candidates.flatten())).index_select(0, plan.index)
        if not self._details and growth is None:
            return Draft(filled, plan.tree, plan.tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        padded = torch.cat((_nothing(shares.device), shares)).index_select(0, plan.index)
        whole = Draft(filled, plan.tree, plan.tensors, padded)
        if growth is None:
            return whole
        guesses = tuple(map(tuple, candidates.tolist())) if self._details else ()
        return _part(whole, growth, guesses)

    def _growth(self, plan: Plan) -> Growth | None:
        """What decides which nodes are drafted now; None: all, or with a grower just the root."""
        if plan.grower is None:
            return None
        found = plan.grower.growth(self._length, self._certainty, plan.asks)
        if plan.grower.is_rich:
            plan.least = 0.0  # who is rich decides without it
        return found

    def _unsure(self, plan: Plan, growth: Growth, root: Tensor, hidden: Tensor) -> Draft | None:
        """The root alone where the first head's best guess does not open the gate."""
        if not growth.gate:
            return None
        values, tokens, sums = self._guesses(hidden, plan, 1)
        if float((values[0, 0].float() - sums[0]).exp()) >= growth.gate:
            return None
        guesses = (tuple(tokens[0].tolist()),) if self._details else ()
        return Draft(root, ROOT, self._alone, _nothing(root.device), guesses)

    def _guesses(self, hidden: Tensor, plan: Plan, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of the first `heads` heads: values and tokens [K, width], and log(sum(exp)) [K]."""
        logits, names = self._heads.draft_logits(hidden, self._lm_head, heads, plan.width)
        values, places, sums = self._heads.best(logits, plan.width)
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
            found = self._plans[nodes, deep] = _shape_of(tree, nodes, deep, self._device)
        return found


def _require_drawable(tree: Tree, heads: MedusaHeads, vocabulary: int) -> None:
    if tree.depth > len(heads):
        raise UsageError(
            f"the tree is {tree.depth} deep and the checkpoint has {len(heads)} heads: "
            f"choose a tree of depth {len(heads)} or less, or --tree auto"
        )
    if tree.width > vocabulary:
        raise UsageError(f"the tree needs {tree.width} predictions of {vocabulary} tokens")


def _part(whole: Draft, growth: Growth, guesses: tuple[tuple[int, ...], ...]) -> Draft:
    """What of a draft the heads are sure of."""
    assert whole.probabilities is not None
    nodes = grow(whole.tree, whole.probabilities.tolist(), growth)
    kept = torch.tensor(nodes, device=whole.tokens.device)
    tokens, shares = (t.index_select(0, kept) for t in (whole.tokens, whole.probabilities))
    tree = subtree(whole.tree, nodes)
    return Draft(tokens, tree, whole.tensors.part(kept), shares, guesses)


@lru_cache(maxsize=32)
def _nothing(device: torch.device) -> Tensor:
    """The root's probability: nobody drafted it."""
    return torch.full((1,), torch.nan, device=device)


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

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
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
