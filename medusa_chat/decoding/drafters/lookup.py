"""Drafters without a model of their own: plain decoding, and prompt lookup."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from medusa_chat.decoding.budget import WHOLE, Budget
from medusa_chat.decoding.draft import Draft, Plan, TreeTensors, text_draft, with_chain
from medusa_chat.decoding.drafters.continuation import Continuation
from medusa_chat.decoding.drafters.drafter import Drafter
from medusa_chat.decoding.tree import ROOT


class Autoregressive:
    """Drafter "none": plain decoding, one token a step."""

    why = "off: plain decoding"
    drafter: Drafter | None = None

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._root = Plan(TreeTensors.of(ROOT, device), reason=self.why)

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        return self._root

    def fill(self, plan: Plan, root: Tensor, hidden: Tensor, details: bool) -> Draft:
        """root int64 [1], the planned tokens after it; hidden [1, d] is not read."""
        return text_draft(plan, root)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        """Does nothing: the hit rates of matches are counted for every token, drafted or not."""


class PromptLookup(Autoregressive):
    """Drafter "prompt-lookup": a chain of the tokens that followed an earlier occurrence of the
    text's last tokens: `nodes` including the root (at most DEPTH + 1), or as a budget allows."""

    why = "off: no match"

    def __init__(self, nodes: int, device: torch.device, budget: Budget | None = None) -> None:
        super().__init__(device)
        self.nodes, self.budget, self._text = nodes, budget, Continuation()
        self._is_drafted = False  # whether the last step had a draft

    def plan(self, tokens: Sequence[int], depth: int) -> Plan:
        self._text.read(tokens)
        chain, reason = self._follow(min(self.nodes - 1, depth))
        self._is_drafted = bool(chain)
        if not chain:
            return replace(self._root, reason=reason)
        return replace(with_chain(ROOT, 1, 0, chain, self._device), reason=reason, sources=())

    def _follow(self, depth: int) -> tuple[Sequence[int], str]:
        """(the next tokens according to the text, the reason for their number)."""
        if self.budget is None:
            tokens = self._text.following(depth)
            return tokens, WHOLE if tokens else self.why
        guess = self._text.guess(depth)
        allowed = self.budget.allow(guess.reached if guess else ())
        return (guess.tokens[: allowed.nodes - 1], allowed.reason) if guess else ((), self.why)

    def learn(self, nodes: int, path: Sequence[int]) -> None:
        if self.budget is not None:
            self.budget.record(nodes, len(path), self._is_drafted, 1)
