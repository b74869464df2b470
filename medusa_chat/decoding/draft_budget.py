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


class DraftBudget:
    """Decides step by step, from measured costs and what was accepted; it never looks at a clock.

    *Trust* is the running ratio of accepted nodes to the number expected by the heads' accuracies.
    It scales the expected nodes, and the size with the most expected tokens per second is chosen.
    With candidates this size decides only whether the heads run. `merge` (dynamic_tree.py) then
    picks the nodes by this step's probabilities, those whose expected tokens are worth their time
    at that size's tokens per second.

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
        between = [] if candidates else [m for m in costs.sizes if m < end]
        self._sizes = sorted({1, end, *between})
        self.trust = 1.0
        usual = end if end > 1 else DEPTH + 1  # where heads never pay only the text drafts
        losses = (costs.at(usual, length) - costs.at(1, length) for length in costs.lengths)
        self._most = self.credit = PATIENCE * max(0.0, *losses)
        self._trials = self.credit  # the same without what the text earned, for trials of the heads
        self._known: dict[int, tuple[float, tuple[float, ...]]] = {}
        self._undrafted: dict[int, tuple[float, ...]] = {}
        self._is_by_heads, self._length = True, 0  # of the step that was allowed last
        self._plain, self._prices = self._look_up(costs.lengths[0])  # where the last step began

    def allow(self, length: int, text: Sequence[float] = ()) -> Allowance:
        """What the next step may draft after `length` tokens in the cache. text: the probabilities
        of a continuation's tokens, in falling order."""
        plain, prices = self._plain, self._prices = self._look_up(length)
        rates = {1: 1 / plain}
        rates |= {m: (1 + self.trust * self._promised(m)) / prices[m - 1] for m in self._sizes[1:]}
        best = max(rates, key=rates.__getitem__)  # of equals the smallest
        found = self._by_heads(rates, best)
        if text:
            found = self._with_text(found, length, text, rates[best])
        self._is_by_heads, self._length = found.by_heads, length
        return found

    def record(
        self, nodes: int, tokens: int, is_drafted: bool = True, guessed: int | None = None
    ) -> None:
        """Account for the step that was allowed last: its nodes, and the tokens it gave, 1 where no
        draft was accepted. is_drafted: whether there was a draft. guessed: the next token, and of
        the others those that the heads had drafted; None: all of them."""
        is_by_heads = self._is_by_heads
        prices = self._prices if is_by_heads else self._text_prices(self._length)
        cost = max(self._plain, prices[min(nodes, len(prices)) - 1])
        spent = cost if is_drafted else self._plain
        by_heads = (tokens if guessed is None else guessed) if is_by_heads else 1
        earned = (1 + SHARE) * self._plain
        self.credit = min(self._most, self.credit + earned * tokens - spent)
        cost = spent if is_by_heads else self._plain
        self._trials = max(0.0, min(self._most, self._trials + earned * by_heads - cost))
        promised = self._promised(nodes if self.candidates is None else len(self.expected))
        if is_drafted and is_by_heads and promised > 0:
            self.trust += MEMORY * (min((by_heads - 1) / promised, MOST_TRUST) - self.trust)

    def _by_heads(self, rates: dict[int, float], best: int) -> Allowance:
        """What the heads may draft. rates: tokens a second by the number of nodes."""
        prices, wanted = self._prices, best
        if best == 1 and len(rates) > 1:
            wanted = self._sizes[1]  # a trial: the text may have become easier to predict
        credit = self.credit if best > 1 else min(self.credit, self._trials)
        affordable = bisect_right(prices, self._plain + credit)
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

    def _with_text(
        self, found: Allowance, length: int, text: Sequence[float], rate: float
    ) -> Allowance:
        """The best of what the heads may draft, at `rate` tokens a second, of the continuation
        alone, and of both."""
        nodes, tokens, alone = self._text_alone(length, text)
        if found.nodes == 1:
            return alone or found
        end = len(self.expected)
        tokens += (1 - text[0]) * self.trust * self._promised(end)
        both = tokens / self._prices[min(end + nodes, len(self._prices)) - 1]
        if alone is not None and alone.rate >= max(both, rate):
            return alone
        prices = self._prices
        if text[0] < max(both, rate) * (prices[1] - prices[0]):
            return found  # its first node would not bring the time that it takes
        reason = TRIAL if found.reason == TRIAL else BOTH
        return replace(found, reason=reason, rate=max(both, rate), by_text=True)

    def _text_alone(
        self, length: int, text: Sequence[float]
    ) -> tuple[int, float, Allowance | None]:
        """Of a continuation: how many nodes pay best where it is drafted alone, the tokens that
        such a step brings, and what it may draft; None where it would not pay."""
        plain, prices = self._plain, self._text_prices(length)
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

    def _look_up(self, length: int) -> tuple[float, tuple[float, ...]]:
        """Seconds of a plain step, and of steps of 1, 2, ... nodes, never falling; of candidates
        each includes the time of the heads, which run before it is known how many are kept."""
        place = length // STRIDE
        if place not in self._known:
            at, end, costs = place * STRIDE, self._sizes[-1], self.costs
            if self.candidates is not None:
                prices = costs.drafted(end, max(len(self.candidates), end + DEPTH), at)
            else:
                prices = tuple(accumulate((costs.at(m, at) for m in range(1, end + 1)), max))
            self._known[place] = costs.at(1, at), prices
        return self._known[place]

    def _text_prices(self, length: int) -> tuple[float, ...]:
        """Seconds of steps of 1, 2, ... nodes that no head drafts, never below a plain one's."""
        place = length // STRIDE
        if place not in self._undrafted:
            self._undrafted[place] = self.costs.undrafted(DEPTH + 1, place * STRIDE)
        return self._undrafted[place]
