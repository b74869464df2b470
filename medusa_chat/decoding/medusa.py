"""Medusa: the drafter that fills a tree with the heads' predictions at the last certain
position."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from medusa_chat.decoding.candidate_budget import Grower
from medusa_chat.decoding.draft_budget import Governor
from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors
from medusa_chat.decoding.dynamic_tree import ASKED_EVERY, DynamicTree, grow, subtree
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError

LogitHead = Callable[[Tensor], Tensor]


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    Heads run at that one position, and only as many as the tree is deep. A Governor chooses how
    many of the tree's first nodes a step has; a Grower drafts the most probable of its candidates;
    without either all nodes are drafted. Raises UsageError when the tree is deeper than there are
    heads, or wider than the vocabulary.
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
        plans: dict[tuple[int, int], Plan] | None = None,
    ) -> None:
        """plans: those of another drafter with the same heads, tree, details and governor."""
        self._governor = None if isinstance(governor, Grower) else governor
        self._grower = governor if isinstance(governor, Grower) else None
        _require_drawable(self._grower.candidates if self._grower else tree, heads, vocabulary)
        self._device = heads.bias.device
        self.tree = tree
        self._heads, self._lm_head, self._details = heads, lm_head, details
        self._vocabulary = vocabulary
        self.least = self._grower.certain if self._grower is not None else 0.0
        self._length, self._certainty = -1, 0.0  # tokens in the cache, and the root's probability
        self._is_drafted = False  # whether heads ran
        self._steps = 0  # that were planned
        self._widest = self._grower.candidates if self._grower else tree  # what plans are cut from
        self._nodes, self._depth = len(self._widest), self._widest.depth
        self._plans = {} if plans is None else plans  # (nodes, depth) -> plan
        self._alone = TreeTensors.of(ROOT, self._device)

    def is_of(
        self,
        heads: MedusaHeads,
        tree: Tree,
        details: bool,
        governor: Governor | Grower | None,
    ) -> bool:
        """Whether a drafter with these arguments would be the same."""
        is_same = self._heads is heads and self._details == details
        is_same = is_same and (self._grower or self._governor) is governor
        return is_same and (self.tree is tree or self.tree == tree)

    def for_new_answer(self) -> "Medusa":
        """A drafter before its first step that shares this one's plans: a short answer takes less
        time than making them."""
        governor = self._grower or self._governor
        shared = self._heads, self._lm_head, self.tree, self._vocabulary, self._details
        return Medusa(*shared, governor, self._plans)

    def plan(self, tokens: Sequence[int], depth: int, certainty: float = 0.0) -> Plan:
        self._length += len(tokens)
        self._steps += 1
        self._certainty = certainty
        grower = self._grower
        if grower is not None and self._steps == 1:
            grower.begin()
        nodes = self._governor.choose(self._length) if self._governor else self._nodes
        made = self._plan_of(nodes, depth)
        made.least = self.least
        self._is_drafted = made.index is not None
        if not self._is_drafted:
            made.tokens = tokens[-1:]
        elif self._details and grower is not None:
            made.asks = self._steps % ASKED_EVERY == 0
            made.is_lasting = not made.asks
        return made

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafter.fill."""
        if plan.index is None:
            return Draft(root, plan.tree, plan.tensors)
        dynamic_tree = self._dynamic_tree(plan)
        if plan.grower is not None and dynamic_tree is None:
            self._is_drafted = False
            return Draft(root, ROOT, self._alone)
        alone = self._unsure(plan, dynamic_tree, root, hidden) if dynamic_tree else None
        if alone is not None:
            return alone
        values, candidates, sums = self._guesses(hidden, plan, plan.tree.depth)
        filled = torch.cat((root, candidates.flatten())).index_select(0, plan.index)
        if not self._details and dynamic_tree is None:
            return Draft(filled, plan.tree, plan.tensors)
        shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
        padded = torch.cat((_nothing(shares.device), shares)).index_select(0, plan.index)
        whole = Draft(filled, plan.tree, plan.tensors, padded)
        if dynamic_tree is None:
            return whole
        guesses = tuple(map(tuple, candidates.tolist())) if self._details else ()
        return _part(whole, dynamic_tree, guesses)

    def _dynamic_tree(self, plan: Plan) -> DynamicTree | None:
        """The rule for this step's nodes; None: all nodes without a grower, with one the root
        alone."""
        if plan.grower is None:
            return None
        found = plan.grower.growth(self._length, self._certainty, plan.asks)
        if plan.grower.is_rich:
            plan.least = 0.0  # a grower that can pay for a usual step does not need the certainty
        return found

    def _unsure(
        self, plan: Plan, dynamic_tree: DynamicTree, root: Tensor, hidden: Tensor
    ) -> Draft | None:
        """The root alone where the first head's best guess is less probable than the gate."""
        if not dynamic_tree.gate:
            return None
        values, tokens, sums = self._guesses(hidden, plan, 1)
        if float((values[0, 0].float() - sums[0]).exp()) >= dynamic_tree.gate:
            return None
        guesses = (tuple(tokens[0].tolist()),) if self._details else ()
        return Draft(root, ROOT, self._alone, _nothing(root.device), guesses)

    def _guesses(self, hidden: Tensor, plan: Plan, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """The first `heads` heads' best guesses after hidden [1, d]: logits and tokens int64 [K,
        width], and log(sum(exp)) of all logits float32 [K]."""
        logits, names = self._heads.draft_logits(hidden, self._lm_head, heads, plan.width)
        values, places, sums = self._heads.best(logits, plan.width)
        return values, places if names is None else names[places], sums

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self._governor is not None:
            self._governor.record(nodes, len(path), self._length)
        if self._grower is not None and self._is_drafted:
            self._grower.record(nodes, len(path))

    def _plan_of(self, nodes: int, depth: int) -> Plan:
        """The plan for `nodes` nodes of at most `depth`, cached; one may be changed and used
        again."""
        key = nodes, min(depth, self._depth)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = Plan(*_shape_of(self._widest, *key, self._device))
            found.grower = self._grower if found.index is not None else None
            found.is_lasting = self._governor is None or len(self.tree) == 1
        return found


def _require_drawable(tree: Tree, heads: MedusaHeads, vocabulary: int) -> None:
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


def _part(whole: Draft, dynamic_tree: DynamicTree, guesses: tuple[tuple[int, ...], ...]) -> Draft:
    """The part of a draft that `dynamic_tree` selects by its probabilities."""
    assert whole.probabilities is not None
    nodes = grow(whole.tree, whole.probabilities.tolist(), dynamic_tree)
    kept = torch.tensor(nodes, device=whole.tokens.device)
    tokens, shares = (t.index_select(0, kept) for t in (whole.tokens, whole.probabilities))
    tree = subtree(whole.tree, nodes)
    return Draft(tokens, tree, whole.tensors.part(kept), shares, guesses)


@lru_cache(maxsize=32)
def _nothing(device: torch.device) -> Tensor:
    """The root's draft probability, NaN float32 [1]: it was not drafted."""
    return torch.full((1,), torch.nan, device=device)


Shape = tuple[Tree, TreeTensors, None, Tensor | None, int]  # the constant fields of a Plan


@lru_cache(maxsize=32)
def _shape_of(tree: Tree, nodes: int, depth: int, device: torch.device) -> Shape:
    """Of the first `nodes` nodes those no deeper than `depth`."""
    cut, width = tree.head(nodes).pruned(depth), tree.width
    places = zip(cut.depths, cut.ranks, strict=True)
    index = [0 if d == 0 else 1 + (d - 1) * width + rank for d, rank in places]
    found = torch.tensor(index, device=device) if len(cut) > 1 else None
    return cut, TreeTensors.of(cut, device), None, found, width
