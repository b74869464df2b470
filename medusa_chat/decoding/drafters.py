"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root.

PromptLookup needs no heads either; the one with heads is in medusa.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.continuation import Continuation
from medusa_chat.decoding.draft import Draft, Plan, TreeTensors, known_draft
from medusa_chat.decoding.tree import ROOT, Choice, Tree


class Drafter(Protocol):
    """Proposes drafts in two calls: `plan` on the host, then `fill` with the tokens on the
    device."""

    name: str

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        """The plan of the next draft.

        tokens: the ids added to the text since the last call (at first the prompt), the root last.
        depth: the largest that the context has room for.
        """
        ...

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The draft of `plan`. root int64 [1], on the device; hidden [1, d]: the backbone's state
        from which the root was predicted."""
        ...

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Account for the last step: its number of nodes, and the accepted ones, the root first."""
        ...


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    name = "none"

    def __init__(self, device: torch.device) -> None:
        self._plan = Plan(ROOT, TreeTensors.of(ROOT, device), reason="off: plain decoding")

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return self._plan

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1] alone; hidden [1, d] is not read."""
        return Draft(root, plan.tree, plan.tensors)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: there is no draft to learn from."""


class PromptLookup:
    """Drafter "prompt-lookup": what followed the last tokens earlier in the text, merged into one
    tree of at most `nodes` nodes."""

    name = "prompt-lookup"

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self._text = Continuation()

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        found = self._merged(depth)
        tree = Tree.from_choices(found)
        made = [tokens[-1], *found.values()] if found else None  # as plain decoding plans the root
        reason = "all" if found else "off: no match"
        return Plan(tree, TreeTensors.of(tree, self._device), made, reason=reason)

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """The planned tokens int64 [n], or root int64 [1] alone; hidden [1, d] is not read."""
        if plan.tokens is None:
            return Draft(root, plan.tree, plan.tensors)
        return known_draft(plan, self._device)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: a match is proposed again however often it was refused."""

    def _merged(self, depth: int) -> dict[Choice, int]:
        """Choice -> token, parents first, at most nodes - 1 of them."""
        found: dict[Choice, int] = {}
        children: dict[Choice, dict[int, Choice]] = {}
        for continuation in self._text.continuations(depth):
            at: Choice = ()
            for token in continuation:
                known = children.setdefault(at, {})
                if token not in known:
                    if len(found) >= self.nodes - 1:
                        return found
                    known[token] = (*at, len(known))
                    found[known[token]] = token
                at = known[token]
        return found
