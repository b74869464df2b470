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

    What is spent is earned first. The *balance* is in seconds by the measured costs: a step adds
    its tokens at plain decoding's price and takes its own cost; a new answer finds what is left of
    it, no debt, and no more than CARRIED usual steps of which nothing is accepted, the first answer
    so many. While it does not pay for such a step, only what looks sure is drafted: behind PROOF
    roots in a row that the backbone was CERTAIN of, where the first head is SURE, and of the rest
    what is worth STRICT times as much as a second brings on average. Where it does pay, up to the
    usual number, what is worth as much as a second brings: by the accuracies, or as it was seen to
    where that is more. Texts that no head foresees are left to plain decoding.

    Over all answers there is *credit*: the same account with SHARE of plain decoding's time added,
    from which every step's worst case is paid, so that after any number of them

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE usual steps' overhead

    whatever the text; and one usual step's overhead more for every step that `asks`.

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
        self.pace = 0.0  # tokens that a plain step's time has brought, in steps of rich accounts
        self.balance = float("inf")  # the accuracies' promise, until it is tried
        self.plain = self.rate = 0.0
        self.enough = float("inf")  # of balance for a usual step of which nothing is accepted
        self.prices: tuple[float, ...] = ()
        self._place = -1
        self._known: dict[int, tuple[float, tuple[float, ...], float, float]] = {}
        self.certain_roots = 0  # in a row, up to the last
        self.length = 0  # behind which the credit was reckoned
        self._is_begun = False

    def begin(self) -> None:
        """Begin a new answer."""
        self.certain_roots, self.length, self._is_begun = 0, 0, False

    @property
    def is_rich(self) -> bool:
        """Whether it can pay for a usual step of which nothing is accepted."""
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
