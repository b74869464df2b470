"""DraftBudget: how many nodes the next step drafts, so that drafts cost no more than they save."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from medusa_chat.decoding.continuation import DEPTH
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.decoding.tree import Tree

MEMORY = 1 / 8  # weight of one step in the running acceptance
PATIENCE = 4.0  # steps without an accepted node that the initial credit pays for
SHARE = 0.015  # share of plain decoding's time that trial drafts may cost in the long run
MOST_TRUST = 4.0
STRIDE = 64  # tokens after which costs are looked up again
# reasons for a step's nodes
WHOLE, TRIAL = "all", "trial"
HEADS, TEXT = "the heads' probabilities", "what the text repeats"
BOTH = "the heads' probabilities and what the text repeats"
NO_PAY, SPENT = "off: drafts would not pay", "off: drafts have cost what they may"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one step may draft. nodes: at most, 1 is plain decoding; reason: why so many, for the
    step's event. Of a dynamic tree besides: seconds[m - 1], of a step of m nodes, its draft
    included; rate: tokens a second that a node has to bring. by_heads, by_text: what drafts."""

    nodes: int
    reason: str
    seconds: tuple[float, ...] = ()
    rate: float = 0.0
    by_heads: bool = True
    by_text: bool = False


@dataclass(frozen=True, slots=True)
class Prices:
    """Seconds of steps behind a text: of a plain one, and of steps of 1, 2, ... nodes, never
    falling, that the heads draft, and that the text alone drafts."""

    plain: float
    by_heads: tuple[float, ...]
    by_text: tuple[float, ...]


class DraftBudget:
    """Decides step by step, from measured costs and what was accepted; it never looks at a clock.

    *Trust* is the running ratio of accepted nodes to the number expected by the heads' accuracies
    (with candidates, of the whole tree). It scales the expected nodes, and the size with the most
    expected tokens per second is chosen. With candidates that size decides whether the heads run,
    and its tokens per second are what a node must bring: `merge` (dynamic_tree.py) picks those that
    do, by this step's probabilities.

    *Credit*, in seconds by the measured costs, limits it: every step adds its tokens at plain
    decoding's time per token, plus SHARE of that, and subtracts its own cost. A size is used only
    where its worst case, no node accepted, leaves a credit of 0 or more; else a smaller one. So
    after any number of steps

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE steps' overhead

    whatever the text. Where plain decoding looks best, drafts are still tried while the credit
    allows: the smallest size, or with candidates what `merge` finds worth it.

    A continuation found in the text (continuation.py) is an offer beside the heads': alone, which
    saves their time, or with them in one tree, whichever promises the most tokens a second. Its
    hit rates are measured without a draft, so it needs no trial; what it earns pays for no trial of
    the heads.
    """

    def __init__(
        self, costs: StepCosts, expected: Sequence[float], candidates: Tree | None = None
    ) -> None:
        """expected[m - 1]: tokens a step with the first m nodes, by the heads' accuracies.
        candidates: the larger tree of which each step drafts the most probable nodes; None: a step
        drafts the first nodes of the tree."""
        self.costs, self.candidates, self.expected = costs, candidates, tuple(expected)
        end = min(len(expected), costs.sizes[-1])
        between = range(1, end) if candidates else [m for m in costs.sizes if m < end]
        self._sizes = sorted({1, end, *between})
        self.trust = 1.0
        usual = end if end > 1 else DEPTH + 1  # where heads never pay only the text drafts
        losses = (costs.at(usual, length) - costs.at(1, length) for length in costs.lengths)
        self._most = self.credit = PATIENCE * max(0.0, *losses)
        self._trials = self.credit  # the same without what the text earned, for trials of the heads
        self._known: dict[int, Prices] = {}
        self._is_by_heads = True  # the step that was allowed last
        self._prices = self._look_up(costs.lengths[0])  # where it begins

    def allow(self, length: int, text: Sequence[float] = ()) -> Allowance:
        """What the next step may draft after `length` tokens in the cache. text: the probabilities
        of a continuation's tokens, in falling order."""
        prices = self._prices = self._look_up(length)
        rates = {1: 1 / prices.plain}
        for m in self._sizes[1:]:
            rates[m] = (1 + self.trust * self._promised(m)) / prices.by_heads[m - 1]
        best = max(rates, key=rates.__getitem__)  # of equals the smallest
        found = self._by_heads(rates, best)
        if text:
            found = self._with_text(found, text, rates[best])
        self._is_by_heads = found.by_heads
        return found

    def record(
        self, nodes: int, tokens: int, is_drafted: bool = True, guessed: int | None = None
    ) -> None:
        """Account for the step that was allowed last: its nodes, and the tokens it gave, 1 where no
        draft was accepted. is_drafted: whether there was a draft. guessed: the next token, and of
        the others those that the heads had drafted; None: all of them."""
        is_by_heads, plain = self._is_by_heads, self._prices.plain
        prices = self._prices.by_heads if is_by_heads else self._prices.by_text
        spent = max(plain, prices[min(nodes, len(prices)) - 1]) if is_drafted else plain
        by_heads = (tokens if guessed is None else guessed) if is_by_heads else 1
        earned = (1 + SHARE) * plain
        self.credit = min(self._most, self.credit + earned * tokens - spent)
        cost = spent if is_by_heads else plain
        self._trials = max(0.0, min(self._most, self._trials + earned * by_heads - cost))
        promised = self._promised(nodes if self.candidates is None else len(self.expected))
        if is_drafted and is_by_heads and promised > 0:
            self.trust += MEMORY * (min((by_heads - 1) / promised, MOST_TRUST) - self.trust)

    def _by_heads(self, rates: dict[int, float], best: int) -> Allowance:
        """What the heads may draft. rates: tokens a second by the number of nodes."""
        prices, wanted = self._prices.by_heads, best
        if best == 1 and len(rates) > 1:
            wanted = self._sizes[1]  # a trial: the text may have become easier to predict
        credit = self.credit if best > 1 else min(self.credit, self._trials)
        affordable = bisect_right(prices, self._prices.plain + credit)
        if self.candidates is not None and affordable > 1:
            return Allowance(affordable, HEADS if best > 1 else TRIAL, prices, rates[best])
        nodes = max(m for m in self._sizes if m <= min(wanted, max(affordable, 1)))
        if nodes == 1:
            return Allowance(1, NO_PAY if best == 1 else SPENT)
        if best == 1:
            return Allowance(nodes, TRIAL)
        if nodes < wanted:
            return Allowance(nodes, "what is left to spend")
        return Allowance(nodes, WHOLE if nodes == self._sizes[-1] else "the most tokens a second")

    def _with_text(self, found: Allowance, text: Sequence[float], rate: float) -> Allowance:
        """The best of what the heads may draft, at `rate` tokens a second, of the continuation
        alone, and of both."""
        nodes, tokens, alone = self._text_alone(text)
        if found.nodes == 1:
            return alone or found
        end = len(self.expected)
        tokens += (1 - text[0]) * self.trust * self._promised(end)
        prices = self._prices.by_heads
        both = tokens / prices[min(end + nodes, len(prices)) - 1]
        if alone is not None and alone.rate >= max(both, rate):
            return alone
        if text[0] < max(both, rate) * (prices[1] - prices[0]):
            return found  # its first node would not bring the time that it takes
        reason = TRIAL if found.reason == TRIAL else BOTH
        return replace(found, reason=reason, rate=max(both, rate), by_text=True)

    def _text_alone(self, text: Sequence[float]) -> tuple[int, float, Allowance | None]:
        """Of a continuation: how many nodes pay best where it is drafted alone, the tokens that
        such a step brings, and what it may draft; None where it would not pay."""
        plain, prices = self._prices.plain, self._prices.by_text
        count, tokens, total, most = 0, 1.0, 1.0, 1 / plain
        affordable = bisect_right(prices, plain + self.credit)
        for number, probability in enumerate(text[: max(affordable, 1) - 1], start=1):
            total += probability
            if total / prices[number] > most:
                most, count, tokens = total / prices[number], number, total
        if not count:
            return 0, 1.0 + sum(text), None
        return count, tokens, Allowance(count + 1, TEXT, prices, most, False, True)

    def _promised(self, nodes: int) -> float:
        """Tokens beside the next one that a step of so many nodes should bring."""
        return self.expected[min(nodes, len(self.expected)) - 1] - 1

    def _look_up(self, length: int) -> Prices:
        """The prices behind `length` tokens; of candidates each price by the heads includes their
        time, for they run before it is known how many nodes are kept."""
        place = length // STRIDE
        if place not in self._known:
            at, end, costs = place * STRIDE, self._sizes[-1], self.costs
            if self.candidates is not None:
                by_heads = costs.drafted(end, max(len(self.candidates), end + DEPTH), at)
            else:
                by_heads = tuple(accumulate((costs.at(m, at) for m in range(1, end + 1)), max))
            by_text = costs.undrafted(DEPTH + 1, at)
            self._known[place] = Prices(costs.at(1, at), by_heads, by_text)
        return self._known[place]
