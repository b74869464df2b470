"""TreeDrafting: drafts one answer by a drafter and the text's repetitions, as a budget allows."""

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa_chat.decoding.budget import WHOLE, Allowance, Budget
from medusa_chat.decoding.draft import Draft, Plan, indexed, shape_of, text_draft, with_chain
from medusa_chat.decoding.drafters.builder import NONE, merge
from medusa_chat.decoding.drafters.continuation import Continuation, Guess
from medusa_chat.decoding.drafters.drafter import Candidates, Drafter, Levels
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.tree import ROOT, Tree

FIXED = (8, 4, 2)  # lengths of a continuation in a recorded step's tree, at most half of its nodes
SURE = 1.0  # expected tokens of a continuation that is worth taking nodes from the levels there


class TreeDrafting:
    """Drafts the trees of one answer.

    *Levels* fill `tree` with their top predictions at each depth; a *drafter* that follows the text
    proposes candidates of its own. A Budget decides how many nodes a step drafts, if any: the
    tree's first nodes, or, if it cuts drafts, the most probable ones. Without a budget all nodes
    are drafted.

    With `reads_text` (drafter "auto") the text is read, too: if its last tokens occurred earlier
    (Continuation), the tokens that followed there are drafted. A Budget that cuts drafts decides
    whether the drafter drafts, the text, or both. Otherwise the number of nodes stays the same and
    the most probable candidates of both are drafted. In recorded steps the host does not know what
    the levels will guess: there the tree's last nodes become a chain for the continuation, if it
    promises SURE tokens or more.
    """

    def __init__(
        self,
        source: Levels | Drafter,
        device: torch.device,
        tree: Tree = ROOT,
        nodes: int | None = None,
        budget: Budget | None = None,
        reads_text: bool = False,
        is_recorded: bool = False,
    ) -> None:
        """tree: that levels fill, of which UsageError tells where they cannot. nodes: of a draft
        without a budget, None for the tree's. is_recorded: whether steps are recorded, so that the
        host reads nothing within a step."""
        self.tree, self.budget, self._device = tree, budget, device
        self.drafter: Drafter | None = None
        self._levels: Levels | None = None
        if isinstance(source, Levels):
            self._levels = source
            source.require(tree)
        else:
            self.drafter = source
        self._kind = source.kind
        self._is_grown = budget is not None and budget.is_cut
        self._is_recorded = is_recorded and not self._is_grown
        self._is_weighed = self._is_grown or (len(tree) == 1 and not is_recorded)
        self._text = Continuation() if reads_text else None
        self._allowance = Allowance(nodes or len(tree), WHOLE)
        self._is_drafted = False  # whether the last draft has more than the root
        self._guess: Guess | None = None  # the text's, if it is drafted in this step
        self._sources: tuple[Source | None, ...] = ()  # of the last draft
        self._said: float | None = None  # the sum of its probabilities, if they cut it
        self._passes = 0.0  # of the drafter, for the last draft

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        guess, self._said = None, None
        if self._text is not None:
            self._text.read(tokens)
            guess = self._text.guess(depth)
        self._allowance = self._allow(guess)
        self._guess = guess if self._allowance.by_text else None
        if self._guess is not None and not self._allowance.by_heads:
            made = self._by_text(self._guess)
        elif self.drafter is not None:
            made = self._by_drafter(self.drafter, tokens[-1], depth)
        elif self._guess is None:
            made = self._by_levels(depth, self._is_grown)
        elif self._is_recorded:
            made = self._of_fixed_shape(self._guess, depth)
        else:
            made = self._by_levels(depth, True)
        self._is_drafted, self._sources = len(made.tree) > 1, made.sources
        self._passes = made.passes
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

    def _by_levels(self, depth: int, is_grown: bool) -> Plan:
        """The plan of what the levels may draft, at most `depth` deep. is_grown: `fill` then
        selects some of its nodes."""
        tree, nodes, reason = self.tree, self._allowance.nodes, self._allowance.reason
        nodes = len(tree) if self._is_grown and nodes > 1 else nodes
        tensors, index = indexed(tree, nodes, min(depth, tree.depth), self._device)
        is_grown, deep = is_grown and index is not None, tensors.tree.depth
        return Plan(tensors, index, tree.width, is_grown, reason, deep, passes=min(deep, 1))

    def _by_drafter(self, drafter: Drafter, root: int, depth: int) -> Plan:
        """The plan of the best of what the drafter proposes after the root, and of the text."""
        allowance, reason = self._allowance, self._allowance.reason
        if allowance.nodes == 1 or depth < 1:
            return Plan(indexed(ROOT, 1, 0, self._device)[0], reason=reason)
        found = drafter.draft(root, depth, allowance)
        made = merge(found, self._guess, allowance, self._kind)
        self._said = made.said
        text = torch.frombuffer(array("q", made.tokens), dtype=torch.long)[1:].to(self._device)
        return Plan(
            shape_of(made.parents, made.ranks, self._device),
            reason=reason,
            text=text,
            sources=made.sources,
            shares=made.shares,
            passes=found.passes,
        )

    def _by_text(self, guess: Guess) -> Plan:
        """The plan of a continuation alone, without the drafter."""
        tokens = guess.tokens[: self._allowance.nodes - 1]
        made = with_chain(ROOT, 1, 0, tokens, self._device)
        return replace(made, reason=self._allowance.reason)

    def _of_fixed_shape(self, guess: Guess, depth: int) -> Plan:
        """The plan of the levels' first nodes and a chain from the text, in a recorded step."""
        nodes = self._allowance.nodes
        most = min(len(guess.tokens), nodes // 2, depth)
        count = next((n for n in FIXED if n <= most), 0)
        if not count:
            return self._by_levels(depth, False)
        depth, tokens = min(depth, self.tree.depth), guess.tokens[:count]
        return with_chain(self.tree, nodes - count, depth, tokens, self._device)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """root int64 [1], hidden [1, d]: see Drafting.fill."""
        if self._levels is None or plan.index is None or not plan.heads:
            return text_draft(plan, root)
        values, candidates, sums = self._levels.guesses(hidden, root, plan.heads, plan.width)
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
        the continuation. values, candidates, sums: see Levels.guesses."""
        (token,), logits, guessed, whole = (t.tolist() for t in (root, values, candidates, sums))
        places = list(zip(plan.tree.depths, plan.tree.ranks, strict=True))[1:]
        tokens = [token, *(guessed[depth - 1][rank] for depth, rank in places)]
        shares = [NONE, *(math.exp(logits[d - 1][rank] - whole[d - 1]) for d, rank in places)]
        found = Candidates(plan.tree, tokens, shares)
        made = merge(found, self._guess, self._allowance, self._kind)
        self._said = made.said
        is_alone = set(made.sources) <= {None, self._kind.source}
        self._sources = () if is_alone else made.sources
        tensors = shape_of(made.parents, made.ranks, self._device)
        filled = torch.frombuffer(array("q", made.tokens), dtype=torch.long).to(self._device)
        guesses = tuple(map(tuple, guessed)) if details else ()
        return Draft(filled, tensors, made.shares, guesses, self._sources)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self.budget is not None:
            by_text = sum(self._sources[node] == "text" for node in path) if self._sources else 0
            guessed, kept = len(path) - by_text, self._is_drafted
            self.budget.record(nodes, len(path), kept, guessed, self._said, self._passes)
