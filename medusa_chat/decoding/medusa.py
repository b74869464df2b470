"""Medusa: the drafter that fills a tree with the heads' predictions at the last certain
position."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.draft_budget import WHOLE, Allowance, DraftBudget
from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors
from medusa_chat.decoding.dynamic_tree import grow, subtree
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError

LogitHead = Callable[[Tensor], Tensor]
PlanKey = tuple[int | str, ...]


@dataclass(frozen=True)
class DraftSetup:
    """What a drafter with heads is made from. The drafters of one setup share its plans: a short
    answer takes less time than making them.

    tree: what is drafted, all of it without a budget; vocabulary: tokens that the LM head knows;
    details: whether the draft's probabilities are recorded. budget: how many nodes each step
    drafts. is_recorded: whether steps are recorded, so that a step waits for no number of it.
    """

    heads: MedusaHeads
    lm_head: LogitHead
    tree: Tree
    vocabulary: int
    details: bool
    budget: DraftBudget | None = None
    is_recorded: bool = False
    plans: dict[PlanKey, Plan] = field(default_factory=dict, compare=False)


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    Heads run at that one position, and only as many as the tree is deep. A DraftBudget decides how
    many nodes a step drafts, and whether any: the tree's first ones, or of its candidates the most
    probable ones; without a budget all nodes are drafted. Raises UsageError when the tree is deeper
    than there are heads, or wider than the vocabulary.
    """

    name = "medusa"

    def __init__(self, setup: DraftSetup) -> None:
        candidates = setup.budget.candidates if setup.budget is not None else None
        self._widest = candidates or setup.tree  # what plans are cut from
        _require_drawable(self._widest, setup)
        self._device = setup.heads.bias.device
        self.tree, self._plans, self._budget = setup.tree, setup.plans, setup.budget
        self._heads, self._lm_head, self._details = setup.heads, setup.lm_head, setup.details
        self._is_grown = candidates is not None
        self._length = -1  # tokens in the cache
        self._allowance = Allowance(len(setup.tree), WHOLE)
        self._is_drafted = False  # whether heads ran
        self._alone = TreeTensors.of(ROOT, self._device)

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._length += len(tokens)
        if self._budget is not None:
            self._allowance = self._budget.allow(self._length)
        return self._allowed(depth)

    def _allowed(self, depth: int) -> Plan:
        """The plan of what the heads may draft."""
        nodes, reason = self._allowance.nodes, self._allowance.reason
        if self._is_grown and nodes > 1:
            nodes = len(self._widest)  # `fill` keeps a part of them
        made = self._plan_of(nodes, depth, reason)
        self._is_drafted = made.index is not None
        return made

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafter.fill."""
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        values, candidates, sums = self._guesses(hidden, root, plan, plan.heads)
        text = () if plan.text is None else (plan.text,)
        filled = torch.cat((root, candidates.flatten(), *text)).index_select(0, plan.index)
        if not self._details and not plan.is_grown:
            return Draft(filled, plan.tree, plan.tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        beside = [_nothing(len(tokens), shares.device) for tokens in (root, *text)]
        padded = torch.cat((beside[0], shares, *beside[1:])).index_select(0, plan.index)
        whole = Draft(filled, plan.tree, plan.tensors, padded, (), plan.sources)
        if not plan.is_grown:
            return whole
        guesses = tuple(map(tuple, candidates.tolist())) if self._details else ()
        return self._part(whole, guesses)

    def _part(self, whole: Draft, guesses: tuple[tuple[int, ...], ...]) -> Draft:
        """The part of a draft that the budget allows, by its probabilities."""
        assert whole.probabilities is not None
        nodes = grow(whole.tree, whole.probabilities.tolist(), self._allowance)
        kept = torch.tensor(nodes, device=self._device)
        tokens, shares = (t.index_select(0, kept) for t in (whole.tokens, whole.probabilities))
        if len(nodes) == 1:
            return Draft(tokens, ROOT, self._alone, shares, guesses)
        tree = subtree(whole.tree, nodes)
        return Draft(tokens, tree, whole.tensors.part(kept), shares, guesses)

    def _guesses(
        self, hidden: Tensor, root: Tensor, plan: Plan, heads: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first `heads` heads' best guesses after hidden [1, d] and root int64 [1]: logits and
        tokens int64 [K, width], and log(sum(exp)) of all logits float32 [K]."""
        logits, names = self._heads.draft_logits(hidden, root, self._lm_head, heads, plan.width)
        values, places, sums = self._heads.best(logits, plan.width)
        return values, places if names is None else names[places], sums

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self._budget is not None:
            self._budget.record(nodes, len(path), self._is_drafted)

    def _plan_of(self, nodes: int, depth: int, reason: str) -> Plan:
        """The plan for `nodes` nodes of at most `depth`, cached."""
        depth = min(depth, self._widest.depth)
        key = nodes, depth, reason
        found = self._plans.get(key)
        if found is None:
            tree, tensors, index, width = _shape_of(self._widest, nodes, depth, self._device)
            is_grown = self._is_grown and index is not None
            found = Plan(tree, tensors, None, index, width, is_grown, reason, tree.depth)
            self._plans[key] = found
        return found


def _require_drawable(tree: Tree, setup: DraftSetup) -> None:
    heads, vocabulary = setup.heads, setup.vocabulary
    if tree.depth > len(heads):
        raise UsageError(
            f"the tree has depth {tree.depth} and the checkpoint {len(heads)} heads: "
            f"choose a tree of depth {len(heads)} or less, or --tree auto"
        )
    if tree.width > vocabulary:
        raise UsageError(
            f"the tree needs {tree.width} predictions of a head and the vocabulary has "
            f"{vocabulary} tokens: choose a narrower tree, or --tree auto"
        )


@lru_cache(maxsize=32)
def _nothing(count: int, device: torch.device) -> Tensor:
    """The draft probabilities NaN float32 [count] of nodes that the heads did not draft, as the
    root."""
    return torch.full((count,), torch.nan, device=device)


Shape = tuple[Tree, TreeTensors, Tensor | None, int]  # the constant fields of a Plan


@lru_cache(maxsize=32)
def _shape_of(tree: Tree, nodes: int, depth: int, device: torch.device) -> Shape:
    """Of the first `nodes` nodes those no deeper than `depth`."""
    cut, width = tree.head(nodes).pruned(depth), tree.width
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * width + rank for d, rank in places]
    found = torch.tensor(index, device=device) if len(cut) > 1 else None
    return cut, TreeTensors.of(cut, device), found, width
