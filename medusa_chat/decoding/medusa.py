"""Medusa: the drafter that fills a tree with the heads' predictions."""

import math
from array import array
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.continuation import Guess
from medusa_chat.decoding.draft_budget import WHOLE, Allowance, DraftBudget
from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors, known_draft
from medusa_chat.decoding.dynamic_tree import NONE, merge
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    Heads run at that one position, and only as many as the tree is deep. A DraftBudget decides how
    many nodes a step drafts, and whether any: the tree's first ones, or of its candidates the most
    probable ones; without a budget all nodes are drafted. Raises UsageError when the tree is deeper
    than there are heads, or wider than the vocabulary.
    """

    name = "medusa"

    def __init__(
        self,
        heads: MedusaHeads,
        backbone: Backbone,
        tree: Tree,
        details: bool = True,
        budget: DraftBudget | None = None,
    ) -> None:
        """details: whether the draft's probabilities are recorded."""
        candidates = budget.candidates if budget is not None else None
        self.tree, self._widest = tree, candidates or tree  # the second is what plans are cut from
        _require_drawable(self._widest, len(heads), backbone.vocabulary)
        self._heads, self._lm_head, self._device = heads, backbone.lm_head, heads.bias.device
        self._details, self._budget, self._is_grown = details, budget, candidates is not None
        self._length = -1  # tokens in the cache
        self._allowance = Allowance(len(tree), WHOLE)
        self._is_drafted = False  # whether there is more than the root
        self._guess: Guess | None = None  # of the text, where it is drafted in this step
        self._sources: tuple[Source | None, ...] = ()  # of the last draft

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._length += len(tokens)
        if self._budget is not None:
            self._allowance = self._budget.allow(self._length)
        return self._allowed(depth)

    def _allowed(self, depth: int) -> Plan:
        """The plan of what the heads may draft, at most `depth` deep; of candidates `fill` keeps a
        part."""
        widest, nodes, reason = self._widest, self._allowance.nodes, self._allowance.reason
        nodes = len(widest) if self._is_grown and nodes > 1 else nodes
        tree, tensors, index = indexed(widest, nodes, min(depth, widest.depth), self._device)
        self._is_drafted = index is not None
        is_grown = self._is_grown and self._is_drafted
        return Plan(tree, tensors, None, index, widest.width, is_grown, reason, tree.depth)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafter.fill."""
        if plan.tokens is not None:
            return known_draft(plan, self._device)
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        values, candidates, sums = self._heads.guesses(
            hidden, root, self._lm_head, plan.heads, plan.width
        )
        if plan.is_grown:
            return self._part(plan, root, values, candidates, sums)
        text, drafted = () if plan.text is None else (plan.text,), None
        filled = torch.cat((root, candidates.flatten(), *text)).index_select(0, plan.index)
        if self._details:
            shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
            drafted = torch.cat((root, shares, *text)).index_select(0, plan.index)
        return Draft(filled, plan.tree, plan.tensors, drafted, (), plan.sources)

    def _part(
        self, plan: Plan, root: Tensor, values: Tensor, candidates: Tensor, sums: Tensor
    ) -> Draft:
        """The nodes that are worth their time, by this step's probabilities: of the candidates, and
        of what the text repeats. values, candidates, sums: see MedusaHeads.guesses."""
        (token,), logits, guessed, whole = (t.tolist() for t in (root, values, candidates, sums))
        places = list(zip(plan.tree.depths, plan.tree.ranks, strict=True))[1:]
        tokens = [token, *(guessed[depth - 1][rank] for depth, rank in places)]
        shares = [NONE, *(math.exp(logits[d - 1][rank] - whole[d - 1]) for d, rank in places)]
        made = merge(plan.tree, tokens, shares, self._guess, self._allowance)
        self._sources = made.sources if {"text", "both"} & set(made.sources) else ()
        tree, tensors = _shape_of(made.parents, made.ranks, self._device)
        filled = torch.frombuffer(array("q", made.tokens), dtype=torch.long).to(self._device)
        guesses = tuple(map(tuple, guessed)) if self._details else ()
        return Draft(filled, tree, tensors, made.shares, guesses, self._sources)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self._budget is not None:
            by_text = sum(self._sources[node] == "text" for node in path) if self._sources else 0
            self._budget.record(nodes, len(path), self._is_drafted, len(path) - by_text)


def _require_drawable(tree: Tree, heads: int, vocabulary: int) -> None:
    if tree.depth > heads:
        raise UsageError(
            f"the tree has depth {tree.depth} and the checkpoint {heads} heads: "
            f"choose a tree of depth {heads} or less, or --tree auto"
        )
    if tree.width > vocabulary:
        raise UsageError(
            f"the tree needs {tree.width} predictions of a head and the vocabulary has "
            f"{vocabulary} tokens: choose a narrower tree, or --tree auto"
        )


@lru_cache(maxsize=64)
def indexed(
    tree: Tree, nodes: int, depth: int, device: torch.device
) -> tuple[Tree, TreeTensors, Tensor | None]:
    """The first `nodes` nodes no deeper than `depth`, their constants, and Plan.index of them:
    int64 [n], None where only the root is left."""
    cut = tree.head(nodes).pruned(depth)
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * tree.width + rank for d, rank in places]
    found = torch.tensor(index, device=device) if len(cut) > 1 else None
    return cut, TreeTensors.of(cut, device), found


@lru_cache(maxsize=512)
def _shape_of(
    parents: tuple[int, ...], ranks: tuple[int, ...], device: torch.device
) -> tuple[Tree, TreeTensors]:
    """A merged tree and its constants; few shapes come again and again."""
    tree = Tree(parents, ranks)
    return tree, TreeTensors.of(tree, device)
