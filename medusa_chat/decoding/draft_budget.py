"""DraftBudget: how many nodes the next step drafts, so that drafts cost no more than they save."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree

MEMORY = 1 / 8  # weight of one step in the running acceptance
PATIENCE = 4.0  # steps without an accepted node that the initial credit pays for
SHARE = 0.015  # share of plain decoding's time that trial drafts may cost in the long run
MOST_TRUST = 4.0
STRIDE = 64  # tokens after which costs are looked up again
# reasons for a step's nodes
WHOLE, TRIAL = "all", "trial"
NO_PAY, SPENT = "off: drafts would not pay", "off: drafts have cost what they may"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one step may draft. nodes: at most, 1 is plain decoding; reason: why so many, for the
    step's event. Of a dynamic tree besides: seconds[m - 1], of a step of m nodes, its draft
    included; rate: tokens a second that a node has to bring."""

    nodes: int
    reason: str
    seconds: tuple[float, ...] = ()
    rate: float = 0.0


class DraftBudget:
    """Decides step by step, from measured costs and what was accepted; it never looks at a clock.

    *Trust* is the running ratio of accepted nodes to the number expected by the heads' accuracies.
    It scales the expected nodes, and the size with the most expected tokens per second is chosen.
    With candidates this size decides only whether the heads run. `grow` (dynamic_tree.py) then
    picks the nodes by this step's probabilities, those whose expected tokens are worth their time
    at that size's tokens per second.

    *Credit*, in seconds by the measured costs, limits it: every step adds its tokens at plain
    decoding's time per token, plus SHARE of that, and subtracts its own cost. A size is used only
    where its worst case, no node accepted, leaves a credit of 0 or more; else a smaller one. So
    after any number of steps

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE steps' overhead

    whatever the text. Where plain decoding looks best, drafts are still tried while the credit
    allows: the smallest size, or with candidates what `grow` finds worth it.
    """

    def __init__(
        self, costs: StepCosts, expected: Sequence[float], candidates: Tree | None = None
    ) -> None:
        """expected[m - 1]: tokens a step with the first m nodes, by the heads' accuracies.
        candidates: the larger tree of which each step drafts the most probable nodes; None: a step
        drafts the first nodes of the tree."""
        self.costs, self.candidates, self.expected = costs, candidates, tuple(expected)
        end = min(len(expected), costs.sizes[-1])
        between = [] if candidates else [m for m in costs.sizes if m < end]
        self._sizes = sorted({1, end, *between})
        self.trust = 1.0
        losses = (costs.at(end, length) - costs.at(1, length) for length in costs.lengths)
        self._most = self.credit = PATIENCE * max(0.0, *losses)
        self._known: dict[int, tuple[float, tuple[float, ...]]] = {}
        self._plain, self._prices = self._look_up(costs.lengths[0])  # where the last step began

    def allow(self, length: int) -> Allowance:
        """What the next step may draft after `length` tokens in the cache."""
        plain, prices = self._plain, self._prices = self._look_up(length)
        rates = {1: 1 / plain}
        rates |= {m: (1 + self.trust * self._promised(m)) / prices[m - 1] for m in self._sizes[1:]}
        wanted = best = max(rates, key=rates.__getitem__)  # of equals the smallest
        if best == 1 and len(rates) > 1:
            wanted = self._sizes[1]  # a trial: the text may have become easier to predict
        affordable = bisect_right(prices, plain + self.credit)
        if self.candidates is not None and affordable > 1:
            reason = "the heads' probabilities" if best > 1 else TRIAL
            return Allowance(affordable, reason, prices, rates[best])
        nodes = max(m for m in self._sizes if m <= min(wanted, max(affordable, 1)))
        if nodes == 1:
            return Allowance(1, NO_PAY if best == 1 else SPENT)
        if best == 1:
            return Allowance(nodes, TRIAL)
        if nodes < wanted:
            return Allowance(nodes, "what is left to spend")
        return Allowance(nodes, WHOLE if nodes == self._sizes[-1] else "the most tokens a second")

    def record(self, nodes: int, tokens: int, is_drafted: bool = True) -> None:
        """Account for the step that was allowed last: its nodes, and the tokens it gave, 1 where no
        draft was accepted. is_drafted: whether the heads ran."""
        cost = max(self._plain, self._prices[min(nodes, len(self._prices)) - 1])
        spent = cost if is_drafted else self._plain
        earned = (1 + SHARE) * tokens * self._plain
        self.credit = min(self._most, self.credit + earned - spent)
        promised = self._promised(nodes if self.candidates is None else len(self.expected))
        if is_drafted and promised > 0:
            self.trust += MEMORY * (min((tokens - 1) / promised, MOST_TRUST) - self.trust)

    def _promised(self, nodes: int) -> float:
        """Tokens beside the next one that a step of so many nodes should bring."""
        return self.expected[min(nodes, len(self.expected)) - 1] - 1

    def _look_up(self, length: int) -> tuple[float, tuple[float, ...]]:
        """Seconds of a plain step, and of steps of 1, 2, ... nodes, never falling; of candidates
        each includes the time of the heads, which run before it is known how many are kept."""
        place = length // STRIDE
        if place not in self._known:
            at, end, costs = place * STRIDE, self._sizes[-1], self.costs
            if self.candidates is not None:
                prices = costs.drafted(end, len(self.candidates), at)
            else:
                prices = tuple(accumulate((costs.at(m, at) for m in range(1, end + 1)), max))
            self._known[place] = costs.at(1, at), prices
        return self._known[place]
