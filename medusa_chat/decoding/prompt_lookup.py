"""PromptLookup: the drafter that proposes what followed the last few tokens earlier in the text."""

from collections.abc import Sequence

import torch
from torch import Tensor

from medusa_chat.decoding.drafters import Draft, Plan, TreeTensors
from medusa_chat.decoding.tree import Choice, Tree

NGRAM = 4  # it matches the last 4, 3, 2, then 1 tokens
DEPTH = 10


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
        found = self._merge(min(depth, DEPTH))
        tree = Tree.from_choices(found)
        made = [self._ids[-1], *found.values()]
        reason = "all" if found else "off: no match"
        return Plan(tree, TreeTensors.of(tree, self._device), made, reason=reason)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The planned tokens int64 [n]; root [1] and hidden [1, d] are not read."""
        draft = torch.tensor(plan.tokens, device=self._device)
        return Draft(draft, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: a match is proposed again however often it was refused."""

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
