"""Governor: how many nodes the next step has, so that drafting does not cost more than it saves."""

from collections.abc import Sequence

from medusa_chat.decoding.step_costs import StepCosts

MEMORY = 1 / 8  # weight of one step in the running acceptance
PATIENCE = 4.0  # steps without an accepted node that the initial credit pays for
SHARE = 0.015  # share of plain decoding's time that trial drafts may cost in the long run
MOST_TRUST = 4.0
STRIDE = 64  # tokens after which costs are looked up again


class Governor:
    """Decides step by step, from measured costs and what was accepted; it never looks at a clock.

    *Trust* is the running ratio of accepted nodes to the number expected by the heads' accuracies.
    It scales the expected nodes, and the size with the most expected tokens per second is chosen.
    *Credit*, in seconds by the measured costs, limits it: every step adds its tokens at plain
    decoding's time per token, plus SHARE of that, and subtracts its own cost. A size is used only
    where its worst case, no node accepted, leaves a credit of 0 or more; else a smaller one. So
    after any number of steps

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE steps' overhead

    whatever the text. Where plain decoding looks best, the smallest draft is tried as often as
    the credit allows.
    """

    def __init__(self, costs: StepCosts, expected: Sequence[float]) -> None:
        """expected[m - 1]: tokens a step with the first m nodes, by the heads' accuracies."""
        self.costs = costs
        self.expected = tuple(expected)
        self.trust = 1.0
        end = min(len(expected), costs.sizes[-1])
        self._sizes = sorted({1, end, *(m for m in costs.sizes if m < end)})
        self._places = {nodes: place for place, nodes in enumerate(self._sizes)}
        self._gains = [self.expected[nodes - 1] - 1 for nodes in self._sizes]  # promised nodes
        losses = (costs.at(end, length) - costs.at(1, length) for length in costs.lengths)
        self._most = self.credit = PATIENCE * max(0.0, *losses)
        self._prices: list[float] = []
        self._place = -1

    def choose(self, length: int) -> int:
        """Nodes of the next step after `length` tokens in the cache; 1 is plain decoding."""
        prices, trust = self._prices_at(length), self.trust
        best, most = 0, 0.0
        for place, price in enumerate(prices):
            rate = (1 + trust * self._gains[place]) / price
            if rate > most:
                best, most = place, rate
        if best == 0 and len(prices) > 1:
            best = 1  # a trial: the text may have become easier to predict
        limit = prices[0] + self.credit
        while best and prices[best] > limit:
            best -= 1
        return self._sizes[best]

    def record(self, nodes: int, tokens: int, length: int) -> None:
        """Account for a step of `nodes` nodes that gave `tokens` tokens, 1 where none was
        accepted."""
        prices, place = self._prices_at(length), self._places.get(nodes)
        cost = self.costs.at(nodes, length) if place is None else prices[place]
        spent = max(cost, prices[0])
        earned = (1 + SHARE) * tokens * prices[0]
        self.credit = min(self._most, self.credit + earned - spent)
        promised = self.expected[min(nodes, len(self.expected)) - 1] - 1
        if promised > 0:
            seen = min((tokens - 1) / promised, MOST_TRUST)
            self.trust += MEMORY * (seen - self.trust)

    def _prices_at(self, length: int) -> list[float]:
        """Seconds of a step of each size, looked up again every STRIDE tokens."""
        if length // STRIDE != self._place:
            self._place = length // STRIDE
            at = self._place * STRIDE
            self._prices = [self.costs.at(m, at) for m in self._sizes]
        return self._prices
