"""Medusa: the drafter that fills a tree with the heads' predictions and the text's repetitions."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.budget import WHOLE, Allowance, Budget
from medusa_chat.decoding.continuation import Continuation, Guess
from medusa_chat.decoding.draft import (
    Draft,
    Plan,
    indexed,
    shape_of,
    text_draft,
    with_chain,
)
from medusa_chat.decoding.dynamic_tree import NONE, merge
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.errors import UsageError

FIXED = (8, 4, 2)  # lengths of a continuation in a recorded step's tree, at most half of its nodes
SURE = 1.0  # expected tokens of a continuation that is worth taking nodes from the heads there


class Medusa:
    """Drafter "medusa": the heads' top predictions at the last certain position fill a tree.

    The heads run at that position only, and only as many as the tree is deep. A Budget decides how
    many nodes a step drafts, if any: the tree's first nodes, or, if it cuts drafts, the most
    probable ones. Without a budget all nodes are drafted. Raises UsageError for a tree that is
    deeper than there are heads, or wider than the vocabulary.

    Drafter "auto" also reads the text: if its last tokens occurred earlier (Continuation), the
    tokens that followed there are drafted too. A Budget that cuts drafts decides whether the heads
    draft, the text, or both. Otherwise the number of nodes stays the same and the most probable
    candidates of both are drafted. In recorded steps the host does not know the heads' guesses in
    advance: there the tree's last nodes become a chain for the continuation, if it promises SURE
    tokens or more.
    """

    def __init__(
        self,
        heads: MedusaHeads,
        backbone: Backbone,
        tree: Tree,
        budget: Budget | None = None,
        reads_text: bool = False,
        is_recorded: bool = False,
    ) -> None:
        """is_recorded: whether steps are recorded, so that the host reads nothing within a step."""
        self.name = "auto" if reads_text else "medusa"
        self.tree = tree
        _require_drawable(tree, len(heads), backbone.vocabulary)
        self._heads, self._lm_head, self._device = heads, backbone.lm_head, heads.bias.device
        self.budget, self._is_grown = budget, budget is not None and budget.is_cut
        self._is_recorded = is_recorded and not self._is_grown
        self._is_weighed = self._is_grown or (len(tree) == 1 and not is_recorded)
        self._text = Continuation() if reads_text else None
        self._allowance = Allowance(len(tree), WHOLE)
        self._is_drafted = False  # whether the last draft has more than the root
        self._guess: Guess | None = None  # the text's, if it is drafted in this step
        self._sources: tuple[Source | None, ...] = ()  # of the last draft
        self._said: float | None = None  # the sum of its probabilities, if they cut it

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        guess, self._said = None, None
        if self._text is not None:
            self._text.read(tokens)
            guess = self._text.guess(depth)
        self._allowance = self._allow(guess)
        self._guess = guess if self._allowance.by_text else None
        if self._guess is None:
            made = self._by_heads(depth, self._is_grown)
        elif not self._allowance.by_heads:
            made = self._by_text(self._guess)
        elif self._is_recorded:
            made = self._of_fixed_shape(self._guess, depth)
        else:
            made = self._by_heads(depth, True)
        self._is_drafted, self._sources = len(made.tree) > 1, made.sources
        return made

    def _allow(self, guess: Guess | None) -> Allowance:
        """How much this step may draft, and from which source."""
        if self.budget is None:
            allowance = self._allowance
        elif self._is_weighed:
            return self.budget.allow(guess.reached if guess else ())
        else:
            allowance = self.budget.allow()
        if self._text is None:
            return allowance
        is_taken = guess is not None and (not self._is_recorded or sum(guess.reached) >= SURE)
        return replace(allowance, by_text=is_taken and allowance.nodes > 1)

    def _by_heads(self, depth: int, is_grown: bool) -> Plan:
        """The plan of what the heads may draft, at most `depth` deep. is_grown: `fill` then selects
        some of its nodes."""
        tree, nodes, reason = self.tree, self._allowance.nodes, self._allowance.reason
        nodes = len(tree) if self._is_grown and nodes > 1 else nodes
        tensors, index = indexed(tree, nodes, min(depth, tree.depth), self._device)
        is_grown = is_grown and index is not None
        return Plan(tensors, index, tree.width, is_grown, reason, tensors.tree.depth)

    def _by_text(self, guess: Guess) -> Plan:
        """The plan of a continuation alone, without the heads."""
        tokens = guess.tokens[: self._allowance.nodes - 1]
        made = with_chain(ROOT, 1, 0, tokens, self._device)
        return replace(made, reason=self._allowance.reason)

    def _of_fixed_shape(self, guess: Guess, depth: int) -> Plan:
        """The plan of the heads' first nodes and a chain from the text, in a recorded step."""
        nodes = self._allowance.nodes
        most = min(len(guess.tokens), nodes // 2, depth)
        count = next((n for n in FIXED if n <= most), 0)
        if not count:
            return self._by_heads(depth, False)
        depth, tokens = min(depth, self.tree.depth), guess.tokens[:count]
        return with_chain(self.tree, nodes - count, depth, tokens, self._device)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafter.fill."""
        if plan.index is None or not plan.heads:
            return text_draft(plan, root)
        values, candidates, sums = self._heads.guesses(
            hidden, root, self._lm_head, plan.heads, plan.width
        )
        if plan.is_grown:
            return self._part(plan, root, values, candidates, sums, details)
        text, drafted = () if plan.text is None else (plan.text,), None
        filled = torch.cat((root, candidates.flatten(), *text)).index_select(0, plan.index)
        if details:
            shares = (values.float() - sums.unsqueeze(1)).exp().flatten()
            drafted = torch.cat((root, shares, *text)).index_select(0, plan.index)
        return Draft(filled, plan.tensors, drafted, (), plan.sources)

    def _part(
        self,
        plan: Plan,
        root: Tensor,
        values: Tensor,
        candidates: Tensor,
        sums: Tensor,
        details: bool,
    ) -> Draft:
        """The nodes that are worth their time by this step's probabilities, from the candidates and
        the continuation. values, candidates, sums: see MedusaHeads.guesses."""
        (token,), logits, guessed, whole = (t.tolist() for t in (root, values, candidates, sums))
        places = list(zip(plan.tree.depths, plan.tree.ranks, strict=True))[1:]
        tokens = [token, *(guessed[depth - 1][rank] for depth, rank in places)]
        shares = [NONE, *(math.exp(logits[d - 1][rank] - whole[d - 1]) for d, rank in places)]
        made = merge(plan.tree, tokens, shares, self._guess, self._allowance)
        self._said = made.said
        self._sources = made.sources if {"text", "both"} & set(made.sources) else ()
        tensors = shape_of(made.parents, made.ranks, self._device)
        filled = torch.frombuffer(array("q", made.tokens), dtype=torch.long).to(self._device)
        guesses = tuple(map(tuple, guessed)) if details else ()
        return Draft(filled, tensors, made.shares, guesses, self._sources)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self.budget is not None:
            by_text = sum(self._sources[node] == "text" for node in path) if self._sources else 0
            guessed = len(path) - by_text
            self.budget.record(nodes, len(path), self._is_drafted, guessed, self._said)


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
