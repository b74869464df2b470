"""Grower: how many candidates the next step may draft, so that drafting does not cost more time
than it saves."""

from bisect import bisect_right
from collections.abc import Sequence

from medusa_chat.decoding.draft_budget import PATIENCE, SHARE, STRIDE
from medusa_chat.decoding.dynamic_tree import DynamicTree
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree

CERTAIN = 0.9  # the backbone's probability of a root from which the heads can be trusted
PROOF = 3  # such roots in a row, before drafts are made that the balance does not pay for
SURE = 0.8  # probability of the first head's best guess from which the other heads run
STRICT = 2.0  # a node must then bring so many times the average tokens per second
PACE = 1 / 32  # weight of one step in the running average of tokens per second
CARRIED = 3.0  # failed steps that an answer may pay for from the answers before it


class Grower:
    """Decides step by step, from measured costs and what was accepted; it never looks at a clock.

    The *balance*, in seconds by the measured costs, is the time saved so far: a step adds its
    tokens at plain decoding's time per token and subtracts its own cost. A failed step is one of
    the usual size of which no draft is accepted. A new answer begins with the balance of the last
    one, at least 0 and at most the overhead of CARRIED failed steps; the first answer with that
    maximum.

    - Balance below a failed step's overhead: drafts only after PROOF roots in a row of which the
      backbone was CERTAIN, where the first head is SURE, and only nodes that bring STRICT times
      the average tokens per second.
    - Balance above it (`is_rich`): up to the usual number of nodes, those that bring at least the
      average tokens per second, expected by the accuracies or measured, whichever is more.

    So a text that the heads cannot predict is decoded plainly.

    The *credit* is the same account over all answers, with SHARE of plain decoding's time added.
    Every step's worst case must be covered by it, so that after any number of steps

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE usual steps' overhead

    whatever the text, plus one usual step's overhead for every step that `asks`.

    `growth` and `record` exist in C too (kernels/account.c), for several steps in one call.
    """

    certain, proof, sure, strict = CERTAIN, PROOF, SURE, STRICT

    def __init__(self, costs: StepCosts, expected: Sequence[float], candidates: Tree) -> None:
        """expected[m - 1]: tokens a step with the first m candidates, by the heads' accuracies, up
        to the number that pays best, which is over 1."""
        self.costs, self.candidates = costs, candidates
        self.expected = tuple(expected)
        self.usual = len(self.expected)
        losses = (costs.at(self.usual, n) - costs.at(1, n) for n in costs.lengths)
        self.most = self.credit = PATIENCE * max(0.0, *losses)
        self.pace = 0.0  # measured tokens per plain step's time, of steps while is_rich
        self.balance = float("inf")  # cut to its maximum when the first answer begins
        self.plain = self.rate = 0.0
        self.enough = float("inf")  # seconds: the overhead of a failed step
        self.prices: tuple[float, ...] = ()
        self._place = -1
        self._known: dict[int, tuple[float, tuple[float, ...], float, float]] = {}
        self.certain_roots = 0  # in a row, up to the last
        self.length = 0  # tokens in the cache when the credit was last updated
        self._is_begun = False

    def begin(self) -> None:
        """Begin a new answer."""
        self.certain_roots, self.length, self._is_begun = 0, 0, False

    @property
    def is_rich(self) -> bool:
        """Whether the balance covers a usual step of which no draft is accepted."""
        return self.balance >= self.enough

    def growth(self, length: int, certainty: float, asks: bool = False) -> DynamicTree | None:
        """The rule for the next step's nodes; None for plain decoding. length: tokens in the cache;
        certainty: the root's; asks: draft the usual number of nodes in any case, so that the
        heads' accuracy is recorded."""
        self.look_up(length)
        self.certain_roots = self.certain_roots + 1 if certainty >= self.certain else 0
        is_sure, is_rich = self.certain_roots >= self.proof, self.is_rich
        if asks:
            return DynamicTree(self.prices, self.usual, 0.0)
        if not is_sure and not is_rich:
            return None
        most = bisect_right(self.prices, self.plain + self.credit)
        if most < 2:
            return None
        if is_rich:
            return DynamicTree(
                self.prices, min(most, self.usual), max(self.rate, self.pace / self.plain)
            )
        return DynamicTree(self.prices, most, self.strict * self.rate, self.sure)

    def record(self, nodes: int, tokens: int) -> None:
        """Account for the last step: its number of nodes, and the tokens it gave, 1 where no draft
        was accepted."""
        cost = max(self.plain, self.prices[min(nodes, len(self.prices)) - 1])
        if self.is_rich:
            self.pace += PACE * (tokens * self.plain / cost - self.pace)
        saved = tokens * self.plain - cost
        self.balance += saved
        self.credit = min(self.most, self.credit + saved)

    def look_up(self, length: int) -> None:
        """Bring the account to `length` tokens in the cache: step costs (looked up once every
        STRIDE tokens), the credit for the tokens since the last call, and at the start of an answer
        its balance."""
        if self.length:
            share = SHARE * (length - self.length) * self.plain
            self.credit = min(self.most, self.credit + share)
        self.length = length
        place = length // STRIDE
        if place != self._place:
            self._place = place
            found = self._known.get(place)
            if found is None:
                found = self._known[place] = self._costs_at(place * STRIDE)
            self.plain, self.prices, self.enough, self.rate = found
        if not self._is_begun:
            self._is_begun = True
            self.balance = max(0.0, min(self.balance, CARRIED * self.enough))

    def _costs_at(self, length: int) -> tuple[float, tuple[float, ...], float, float]:
        """(seconds of a plain step, of steps with 1, 2, ... candidates, the usual step's overhead
        in seconds, tokens per second of the faster of plain and usual steps) at `length` tokens."""
        plain, usual = self.costs.at(1, length), self.costs.at(self.usual, length)
        prices = self.costs.drafted(self.usual, len(self.candidates), length)
        enough = max(0.0, prices[self.usual - 1] - plain)
        return plain, prices, enough, max(self.expected[0] / plain, self.expected[-1] / usual)
