"""Combined: the drafter of one tree from both, the heads' guesses and what the text repeats."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.continuation import Continuation, Guess
from medusa_chat.decoding.draft_budget import BOTH, Allowance
from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.medusa import DraftSetup, Medusa
from medusa_chat.decoding.merged_tree import merge
from medusa_chat.decoding.tree import Tree, chain

FIXED = (8, 4, 2)  # tokens of a continuation in a tree of fixed shape, at most half of its nodes
SURE = 1.0  # tokens that a continuation must promise to take nodes from the heads there


class Combined(Medusa):
    """Drafter "auto": as Medusa, and where the end of the text stood before in it (Continuation)
    what followed there is drafted too.

    A DraftBudget of dynamic trees decides which of the two drafts, or both. Otherwise the tree
    keeps its number of nodes, and those are the most probable ones of both. Where steps are
    recorded the host does not know the heads' guesses before a step: there the tree's last nodes
    become a chain for the continuation, where it promises SURE tokens or more.
    """

    name = "auto"

    def __init__(self, setup: DraftSetup) -> None:
        super().__init__(setup)
        self._is_recorded = setup.is_recorded and not self._is_grown
        self._is_weighed = self._is_grown or (len(self.tree) == 1 and not setup.is_recorded)
        self._text = Continuation()
        self._guess: Guess | None = None  # of this step, where it is drafted
        self._sources: tuple[Source | None, ...] = ()  # of the last draft

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        self._length += len(tokens)
        guess = self._text.guess(depth)
        self._allowance = self._allow(guess)
        self._guess = guess if self._allowance.by_text else None
        self._sources = ()
        if self._guess is None:
            return self._allowed(depth)
        if not self._allowance.by_heads:
            made = self._alone_of(tokens[-1], self._guess)
        elif self._is_recorded:
            made = self._fixed(self._guess, depth)
        else:
            made = self._candidates(depth)
        self._is_drafted, self._sources = len(made.tree) > 1, made.sources
        return made

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafter.fill."""
        if plan.tokens is None:
            return super().fill(plan, root, hidden)
        tokens = torch.tensor(plan.tokens, device=self._device)
        return Draft(tokens, plan.tree, plan.tensors, sources=plan.sources)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self._budget is not None:
            by_text = sum(self._sources[node] == "text" for node in path) if self._sources else 0
            self._budget.record(nodes, len(path), self._is_drafted, len(path) - by_text)

    def _allow(self, guess: Guess | None) -> Allowance:
        """What this step may draft, and of what."""
        if self._budget is None:
            found = self._allowance
        elif self._is_weighed:
            return self._budget.allow(self._length, guess.worths if guess else ())
        else:
            found = self._budget.allow(self._length)
        is_taken = guess is not None and (not self._is_recorded or sum(guess.worths) >= SURE)
        return replace(found, by_text=is_taken and found.nodes > 1)

    def _alone_of(self, root: int, guess: Guess) -> Plan:
        """The plan of a continuation without the heads."""
        count, reason = self._allowance.nodes - 1, self._allowance.reason
        tree, tensors, sources = _chain_of(count, self._device)
        return Plan(tree, tensors, (root, *guess.tokens[:count]), reason=reason, sources=sources)

    def _candidates(self, depth: int) -> Plan:
        """The plan of all that the heads may draft; `fill` merges the continuation with it."""
        nodes = len(self._widest) if self._is_grown else self._allowance.nodes
        found = self._plan_of(nodes, depth, self._allowance.reason)
        if found.is_grown or found.index is None:
            return found
        key = "merged", nodes, depth
        if key not in self._plans:
            self._plans[key] = replace(found, is_grown=True)
        return self._plans[key]

    def _part(self, whole: Draft, guesses: tuple[tuple[int, ...], ...]) -> Draft:
        """The part of the heads' candidates that is drafted, and of the continuation."""
        if self._guess is None:
            return super()._part(whole, guesses)
        assert whole.probabilities is not None
        tokens, shares = whole.tokens.tolist(), whole.probabilities.tolist()
        made = merge(whole.tree, tokens, shares, self._guess, self._allowance)
        self._sources = made.sources if {"text", "both"} & set(made.sources) else ()
        tree, tensors = _shape_of(made.parents, made.ranks, self._device)
        filled = torch.tensor(made.tokens, device=self._device)
        drafted = torch.tensor(made.shares, device=self._device)
        return Draft(filled, tree, tensors, drafted, guesses, self._sources)

    def _fixed(self, guess: Guess, depth: int) -> Plan:
        """The plan of a tree of fixed shape: the heads' first nodes and a chain of the text's."""
        nodes, reason = self._allowance.nodes, self._allowance.reason
        most = min(len(guess.tokens), nodes // 2, depth)
        count = next((n for n in FIXED if n <= most), 0)
        if not count:
            return self._allowed(depth)
        key = "fixed", nodes, count, min(depth, self._widest.depth), reason
        found = self._plans.get(key)
        if found is None:
            heads = self._plan_of(nodes - count, depth, reason)
            found = self._plans[key] = _with_chain(heads, count, self._device)
        assert found.text is not None
        found.text.copy_(torch.tensor(guess.tokens[:count]))
        return found


def _with_chain(heads: Plan, count: int, device: torch.device) -> Plan:
    """A plan of heads, and below its root a chain of `count` tokens of the text."""
    own, tree = len(heads.tree), heads.tree
    parents = (*tree.parents, 0, *range(own, own + count - 1))
    whole = Tree(parents, (*tree.ranks, heads.width, *[0] * (count - 1)))
    assert heads.index is not None
    places = 1 + heads.heads * heads.width + torch.arange(count, device=device)
    sources: tuple[Source | None, ...] = (None, *_of("heads", own - 1), *_of("text", count))
    return replace(
        heads,
        tree=whole,
        tensors=TreeTensors.of(whole, device),
        index=torch.cat((heads.index, places)),
        reason=BOTH,
        text=torch.zeros(count, dtype=torch.long, device=device),
        sources=sources,
    )


@lru_cache(maxsize=16)
def _chain_of(
    count: int, device: torch.device
) -> tuple[Tree, TreeTensors, tuple[Source | None, ...]]:
    """A chain of `count` tokens of the text below the root."""
    tree = chain(count)
    return tree, TreeTensors.of(tree, device), (None, *_of("text", count))


def _of(source: Source, count: int) -> tuple[Source, ...]:
    """`count` nodes of one source."""
    return (source,) * count


@lru_cache(maxsize=512)
def _shape_of(
    parents: tuple[int, ...], ranks: tuple[int, ...], device: torch.device
) -> tuple[Tree, TreeTensors]:
    """A merged tree and its constants; few shapes come again and again."""
    tree = Tree(parents, ranks)
    return tree, TreeTensors.of(tree, device)
