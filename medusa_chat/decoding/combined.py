"""Combined: the drafter of one tree from both, the heads' guesses and what the text repeats."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from medusa_chat.decoding.backbone import Backbone
from medusa_chat.decoding.continuation import Continuation, Guess
from medusa_chat.decoding.draft_budget import BOTH, Allowance, DraftBudget
from medusa_chat.decoding.drafters import Plan, TreeTensors
from medusa_chat.decoding.events import Source
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.decoding.medusa import Medusa, indexed
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

    def __init__(
        self,
        heads: MedusaHeads,
        backbone: Backbone,
        tree: Tree,
        details: bool = True,
        budget: DraftBudget | None = None,
        is_recorded: bool = False,
    ) -> None:
        """is_recorded: whether steps are, so that a step waits for no number of it."""
        super().__init__(heads, backbone, tree, details, budget)
        self._is_recorded = is_recorded and not self._is_grown
        self._is_weighed = self._is_grown or (len(tree) == 1 and not is_recorded)
        self._text = Continuation()

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        self._length += len(tokens)
        guess = self._text.guess(depth)
        self._allowance = self._allow(guess)
        self._guess, self._sources = guess if self._allowance.by_text else None, ()
        if self._guess is None:
            return self._allowed(depth)
        if not self._allowance.by_heads:
            made = self._chain(tokens[-1], self._guess)
        elif self._is_recorded:
            made = self._fixed(self._guess, depth)
        else:
            made = self._allowed(depth)
            made = made if made.index is None else replace(made, is_grown=True)
        self._is_drafted, self._sources = len(made.tree) > 1, made.sources
        return made

    def _allow(self, guess: Guess | None) -> Allowance:
        """What this step may draft, and of what."""
        if self._budget is None:
            found = self._allowance
        elif self._is_weighed:
            return self._budget.allow(self._length, guess.reached if guess else ())
        else:
            found = self._budget.allow(self._length)
        is_taken = guess is not None and (not self._is_recorded or sum(guess.reached) >= SURE)
        return replace(found, by_text=is_taken and found.nodes > 1)

    def _chain(self, root: int, guess: Guess) -> Plan:
        """The plan of a continuation without the heads."""
        count, reason = self._allowance.nodes - 1, self._allowance.reason
        tree, tensors, sources = _chain_of(count, self._device)
        return Plan(tree, tensors, (root, *guess.tokens[:count]), reason=reason, sources=sources)

    def _fixed(self, guess: Guess, depth: int) -> Plan:
        """The plan of a tree of fixed shape: the heads' first nodes and a chain of the text's."""
        nodes = self._allowance.nodes
        most = min(len(guess.tokens), nodes // 2, depth)
        count = next((n for n in FIXED if n <= most), 0)
        if not count:
            return self._allowed(depth)
        depth = min(depth, self._widest.depth)
        found = _with_chain(self._widest, nodes - count, depth, count, self._device)
        assert found.text is not None
        found.text.copy_(torch.tensor(guess.tokens[:count]))
        return found


@lru_cache(maxsize=64)
def _with_chain(tree: Tree, nodes: int, depth: int, count: int, device: torch.device) -> Plan:
    """The plan of the first `nodes` nodes no deeper than `depth`, and below the root a chain of
    `count` tokens of the text; the same one each time, for recorded steps read its `text`."""
    heads, _, index = indexed(tree, nodes, depth, device)
    assert index is not None
    own, width = len(heads), tree.width
    parents = (*heads.parents, 0, *range(own, own + count - 1))
    whole = Tree(parents, (*heads.ranks, width, *[0] * (count - 1)))
    places = 1 + heads.depth * width + torch.arange(count, device=device)
    return Plan(
        whole,
        TreeTensors.of(whole, device),
        index=torch.cat((index, places)),
        width=width,
        reason=BOTH,
        heads=heads.depth,
        text=torch.zeros(count, dtype=torch.long, device=device),
        sources=(None, *_of("heads", own - 1), *_of("text", count)),
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
