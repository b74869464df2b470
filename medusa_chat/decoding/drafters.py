"""Drafters: what proposes the tokens of the next step. Plain decoding proposes only the root.

PromptLookup needs no heads either; the one with heads is in medusa.py.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from medusa_chat.decoding.continuation import Continuation
from medusa_chat.decoding.draft import Draft, Plan, TreeTensors, text_chain, text_draft
from medusa_chat.decoding.tree import ROOT


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
    """Drafter "prompt-lookup": what followed the text's end where it stood before, as a chain of
    one length (`nodes` with the root, at most DEPTH + 1): recorded steps are of one kind then."""

    name = "prompt-lookup"

    def __init__(self, nodes: int, device: torch.device) -> None:
        self.nodes, self._device = nodes, device
        self._text = Continuation()
        self._root = Plan(ROOT, TreeTensors.of(ROOT, device), reason="off: no match")

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        found = self._text.following(min(self.nodes - 1, depth))
        return text_chain(found, self._device) if found else self._root

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor) -> Draft:
        """root int64 [1], the planned tokens after it; hidden [1, d] is not read."""
        return text_draft(plan, root)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: the hit rates of matches are those of every token, drafted or not."""
