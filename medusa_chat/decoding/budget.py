"""Budget: how much each step drafts, so that drafts cost no more than they save. No torch.

All of it is in plain steps: a cost of 1.3 is 1.3 times the time of a step without a draft. Costs
are learnt from the steps of answers (StepTimes), expected tokens from the drafter's own
probabilities and what was accepted of them. Nothing is timed beside answers, and nothing outlives
the model.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, log, log2
from statistics import median

from medusa_chat.decoding.events import Learnt

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # whose costs are learnt
NEAR = 7  # latest steps whose median is the speed of the machine at this moment
FIRST, SLOWEST = 3.0, 1 / 48  # one step's weight in a size's cost: 1 / FIRST at first, later this
JUMP = 0.4  # most that one step may be off, as a logarithm: a single slow one tells little
PLAIN_EVERY, MOST_EVERY = 8, 256  # steps between two plain ones, taken to know their time
CREDIT = 3.0  # plain steps' time that drafts may cost more than they save
SHARE = 0.015  # of plain decoding's time, that trials may cost besides in the long run
MEMORY = 1 / 24  # weight of a step in what drafts brought lately
SURE_MEMORY = 1 / 64  # weight of a step in the correction of probabilities
SURE, WEIGHT = 0.85, 4.0  # the correction at first, as if so many tokens had shown it
MOST_TOLD = 64  # nodes of the largest step whose cost is told
STAY = 1.03  # what another size of a recorded tree must bring over the one in use
GIVEN = 0
# reasons for a step's nodes
WHOLE, TRIAL = "all", "trial"
HEADS, TEXT = "the heads' probabilities", "what the text repeats"
BOTH = "the heads' probabilities and what the text repeats"
NO_PAY, SPENT = "off: drafts would not pay", "off: drafts have cost what they may"
TIMED = "off: a plain step, to know its time"


class StepTimes:
    """The cost of a model's steps by their number of nodes, learnt from each step.

    A step's time is the machine's speed at this moment times its size's cost. The speed is a median
    over the latest steps of all sizes, so that a busy moment changes no cost: only steps that are
    close in time are compared. A size's cost is the prior's, corrected by a running mean; sizes
    that no step had are corrected as those beside them.
    """

    def __init__(self, prior: Sequence[float], draft: float = 0.0, skipped: int = 0) -> None:
        """prior[n - 1]: cost of a step of n nodes, never falling, from 1. draft: of the heads. Both
        in plain steps. skipped: first steps of a size that run slower than the later ones."""
        self.prior, self.draft, self._skipped = tuple(prior), draft, skipped
        self.count = 0  # steps
        self._seen = [0] * len(SIZES)
        self._plain_at = self._drafts = 0
        self._speeds: deque[float] = deque(maxlen=NEAR)  # logarithms of seconds over cost
        self._corrections = [0.0] * len(SIZES)  # logarithms
        self._costs: tuple[float, ...] | None = self.prior

    def record(self, nodes: int, seconds: float, draft_seconds: float, is_by_heads: bool) -> None:
        """Account for a step. seconds: of all but the draft."""
        size = min(bisect_left(SIZES, nodes), len(SIZES) - 1)
        self.count += 1
        if nodes == 1:
            self._plain_at = self.count
        self._seen[size] += 1
        seen = self._seen[size] - self._skipped
        if seen <= 0 or seconds <= 0:
            return
        corrections = self._filled()
        known = log(self.prior[min(nodes, len(self.prior)) - 1]) + corrections[size]
        self._speeds.append(log(seconds) - known)
        speed = median(self._speeds)
        off = max(-JUMP, min(JUMP, log(seconds) - known - speed))
        self._corrections[size] = corrections[size] + max(1 / (seen + FIRST), SLOWEST) * off
        if is_by_heads:
            self._drafts += 1
            cost = min(draft_seconds / exp(speed + corrections[0]), 4 * max(self.draft, 0.05))
            self.draft += max(1 / (self._drafts + FIRST), SLOWEST) * (cost - self.draft)
        if self.count < 16 or self.count % 4 == 0:
            self._costs = None

    @property
    def plain_seconds(self) -> float:
        """Of a plain step at this moment; 0 before any step."""
        return exp(median(self._speeds) + self._filled()[0]) if self._speeds else 0.0

    @property
    def wants_plain(self) -> bool:
        """Whether a plain step should be taken, to know its time."""
        return self.count - self._plain_at >= min(PLAIN_EVERY * (1 + self._seen[0]), MOST_EVERY)

    def costs(self) -> tuple[float, ...]:
        """[n - 1]: of a step of n nodes without its draft, in plain steps, never falling."""
        if self._costs is None:
            values = self._filled()
            factors = [exp(value - values[0]) for value in values]
            whole = (p * _between(factors, n) for n, p in enumerate(self.prior, start=1))
            self._costs = tuple(accumulate((max(1.0, value) for value in whole), max))
        return self._costs

    def _filled(self) -> list[float]:
        """The corrections; those of sizes without a step follow from their neighbours'."""
        known = [i for i, seen in enumerate(self._seen) if seen > self._skipped]
        if not known:
            return self._corrections
        found = self._corrections
        for i in range(len(SIZES)):
            if self._seen[i] > self._skipped:
                continue
            right = bisect_left(known, i)
            if right in (0, len(known)):
                found[i] = found[known[min(right, len(known) - 1)]]
                continue
            a, b = known[right - 1], known[right]
            share = log2(SIZES[i] / SIZES[a]) / log2(SIZES[b] / SIZES[a])
            found[i] = found[a] + share * (found[b] - found[a])
        return found


def _between(factors: Sequence[float], nodes: int) -> float:
    """Of a number of nodes, between those of the SIZES beside it."""
    right = bisect_left(SIZES, nodes)
    if right >= len(SIZES) or SIZES[right] == nodes:
        return factors[min(right, len(SIZES) - 1)]
    low, high = SIZES[right - 1], SIZES[right]
    return factors[right - 1] + (nodes - low) / (high - low) * (factors[right] - factors[right - 1])


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one step may draft. nodes: at most, 1 is plain decoding; reason: why so many, for the
    step's event. To cut a draft by its probabilities: costs[m - 1], of a step of m nodes, draft
    included; rate: tokens for each plain step's time that a node has to bring; sureness: factor on
    the heads' probabilities. by_heads, by_text: what drafts."""

    nodes: int
    reason: str
    costs: tuple[float, ...] = ()
    rate: float = 0.0
    sureness: float = 1.0
    by_heads: bool = True
    by_text: bool = False

    def cut(self, probabilities: Sequence[float]) -> int:
        """How many of a draft's nodes to keep. probabilities: of the nodes but the root, falling;
        without costs as many as are allowed."""
        count, total = 0, 1.0
        if not self.costs:
            return min(len(probabilities), self.nodes - 1)
        most = 1.0 - self.rate * self.costs[0]
        for number, probability in enumerate(probabilities[: self.nodes - 1], start=1):
            total += probability
            value = total - self.rate * self.costs[number]
            if value > most:
                most, count = value, number
        return count


class Budget:
    """Decides step by step for one drafter, by costs and by what was accepted."""

    def __init__(self, times: StepTimes, chain: int) -> None:
        self._by, self._chain = times, chain
        self._right, self._said = SURE * WEIGHT, WEIGHT
        self._is_by_heads = self._is_alone = True  # the step that was allowed last
        self._given = self._spent = 0.0  # a step that the heads draft alone: tokens, and its cost
        self._size = 1  # of a recorded tree, the last one
        self.credit = self._trials = CREDIT
        self.begin((1.0,), False)

    def begin(self, expected: Sequence[float], is_cut: bool) -> None:
        self.expected, self.is_cut = tuple(expected), is_cut
        end = len(expected)
        between = range(1, end) if is_cut else [m for m in SIZES if 8 <= m < end]
        self._sizes = sorted({1, end, *between})
        self._refresh()
        if not self._spent:
            self._given, self._spent = self.expected[-1], self._by_heads[end - 1]

    def allow(self, text: Sequence[float] = ()) -> Allowance:
        self._refresh()
        if self._by.wants_plain:
            self._is_by_heads = True
            return Allowance(1, TIMED)
        rates = self._rates()
        best = max(rates, key=rates.__getitem__)  # of equals the smallest
        if not self.is_cut and rates.get(self._size, 0.0) * STAY > rates[best]:
            best = self._size
        self._size = best
        allowance = self._of_heads(rates, best)
        if text:
            allowance = self._with_text(allowance, text, rates[best])
        self._is_by_heads = allowance.by_heads
        self._is_alone = allowance.by_heads and not allowance.by_text
        return allowance

    def _rates(self) -> dict[int, float]:
        rates = {1: 1.0}
        if self.is_cut and len(self._sizes) > 1:
            rates[self._sizes[-1]] = self._given / self._spent
            return rates
        for m in self._sizes[1:]:
            rates[m] = (1 + self.sureness * self._promised(m)) / self._by_heads[m - 1]
        return rates

    def record(
        self, nodes: int, tokens: int, is_drafted: bool, guessed: int, said: float | None = None
    ) -> None:
        costs = self._by_heads if self._is_by_heads else self._by_text
        spent = max(1.0, costs[min(nodes, len(costs)) - 1]) if is_drafted else 1.0
        by_heads = guessed if self._is_by_heads else 1
        self.credit = min(CREDIT, self.credit + (1 + SHARE) * tokens - spent)
        cost = spent if self._is_by_heads else 1.0
        self._trials = max(0.0, min(CREDIT, self._trials + (1 + SHARE) * by_heads - cost))
        if is_drafted and self._is_by_heads:
            if said is None:
                said = self._promised(nodes)
            if self._is_alone:
                got = tokens
                if GIVEN:
                    got = GIVEN * (1 + self.sureness * said) + (1 - GIVEN) * tokens
                self._given += MEMORY * (got - self._given)
                self._spent += MEMORY * (spent - self._spent)
        if said:
            keep = 1 - SURE_MEMORY
            self._right = keep * self._right + guessed - 1
            self._said = keep * self._said + said

    @property
    def sureness(self) -> float:
        """Factor on the heads' probabilities."""
        return min(self._right / self._said, 1.5)

    @property
    def learnt(self) -> Learnt:
        """What an answer's end tells of it."""
        self._refresh()
        nodes = tuple(n for n in SIZES if n <= min(MOST_TOLD, len(self._by_heads)))
        costs = self._by_text if self.expected == (1.0,) else self._by_heads
        told = (1.0, *(costs[n - 1] for n in nodes[1:]))
        seconds, count = self._by.plain_seconds, self._by.count
        return Learnt(seconds, nodes, told, count, self.sureness, self.sureness)

    def _refresh(self) -> None:
        """Take over what was learnt of the costs."""
        costs = self._by.costs()
        self._by_heads = tuple(cost + self._by.draft for cost in costs)
        self._by_text = costs

    def _of_heads(self, rates: dict[int, float], best: int) -> Allowance:
        """What the heads may draft. rates: tokens a plain step by the number of nodes."""
        wanted = best
        if best == 1 and len(rates) > 1:
            wanted = self._sizes[1]  # a trial: the text may have become easier to predict
        credit = self.credit if best > 1 else min(self.credit, self._trials)
        affordable = bisect_right(self._by_heads, 1.0 + credit)
        if self.is_cut and affordable > 1 and len(rates) > 1:
            reason = HEADS if best > 1 else TRIAL
            return Allowance(affordable, reason, self._by_heads, rates[best], self.sureness)
        nodes = max(m for m in self._sizes if m <= min(wanted, max(affordable, 1)))
        if nodes == 1:
            return Allowance(1, NO_PAY if best == 1 else SPENT)
        if best == 1:
            return Allowance(nodes, TRIAL)
        if nodes < wanted:
            return Allowance(nodes, "what is left to spend")
        return Allowance(nodes, WHOLE if nodes == self._sizes[-1] else "the most tokens a second")

    def _with_text(self, found: Allowance, text: Sequence[float], rate: float) -> Allowance:
        nodes, tokens, alone = self._text_alone(text)
        if found.nodes == 1:
            return alone or found
        end, costs = len(self.expected), self._by_heads
        beside = self._given - 1 if self.is_cut else self.sureness * self._promised(end)
        tokens += (1 - text[0]) * beside
        both = tokens / costs[min(end + nodes, len(costs)) - 1]
        if alone is not None and alone.rate >= max(both, rate):
            return alone
        if text[0] < max(both, rate) * (costs[1] - costs[0]):
            return found  # its first node would not bring the time that it takes
        reason = TRIAL if found.reason == TRIAL else BOTH
        return replace(found, reason=reason, rate=max(both, rate), by_text=True)

    def _text_alone(self, text: Sequence[float]) -> tuple[int, float, Allowance | None]:
        """Of a continuation: how many nodes pay best where it is drafted alone, the tokens that
        such a step brings, and what it may draft; None where it would not pay."""
        costs = self._by_text
        count, tokens, total, most = 0, 1.0, 1.0, 1.0
        affordable = bisect_right(costs, 1.0 + self.credit)
        for number, probability in enumerate(text[: max(affordable, 1) - 1], start=1):
            total += probability
            if total / costs[number] > most:
                most, count, tokens = total / costs[number], number, total
        if not count:
            return 0, 1.0 + sum(text), None
        return count, tokens, Allowance(count + 1, TEXT, costs, most, 1.0, False, True)

    def _promised(self, nodes: int) -> float:
        """Tokens beside the next one that a step of so many nodes should bring."""
        return self.expected[min(nodes, len(self.expected)) - 1] - 1
