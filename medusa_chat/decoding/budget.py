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
from math import log2
from statistics import median

from medusa_chat.decoding.events import Learnt

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # steps timed alike
WINDOW = 9  # latest steps of a size whose median counts
LEAST = 3  # steps of a size before its own times count: one of them may have met a busy moment
STALE = 512  # steps after which a time is forgotten
PLAIN_EVERY = 8  # steps between two plain ones while too few were seen
MEMORY = 1 / 8  # weight of one step in the running acceptance
CUT_MEMORY = 1 / 12  # the same of drafts that are cut, which are of many sizes
SURE_MEMORY = 1 / 64  # the same for the correction of probabilities
SURE_START, SURE_WEIGHT = 0.9, 4.0  # drafters are too sure: at first as if 4 tokens had shown it
PATIENCE = 4.0  # steps without an accepted node that the initial credit pays for
SHARE = 0.015  # share of plain decoding's time that trial drafts may cost in the long run
MOST_TRUST = 4.0
MOST_TOLD = 64  # nodes of the largest step whose cost is told
STAY = 1.03  # what another size of a recorded tree must bring over the one in use
# reasons for a step's nodes
WHOLE, TRIAL = "all", "trial"
HEADS, TEXT = "the heads' probabilities", "what the text repeats"
BOTH = "the heads' probabilities and what the text repeats"
NO_PAY, SPENT = "off: drafts would not pay", "off: drafts have cost what they may"
TIMED = "off: a plain step, to know its time"


class StepTimes:
    """Seconds of a model's steps by their number of nodes, and of its heads' drafts.

    Costs begin as a prior. From LEAST steps of a size on the median of its latest ones counts, and
    sizes between follow the prior's shape; a busy moment moves no median, a changed machine all of
    them within a few steps.
    """

    def __init__(self, prior: Sequence[float], draft: float = 0.0, skipped: int = 0) -> None:
        """prior[n - 1]: cost of a step of n nodes, never falling, from 1. draft: of the heads. Both
        in plain steps. skipped: first steps of a size that run slower than the later ones."""
        self.prior = tuple(prior)
        self._draft_prior, self._skipped = draft, skipped
        self._seen = [0] * len(SIZES)
        self._times: list[deque[tuple[int, float]]] = [deque(maxlen=WINDOW) for _ in SIZES]
        self._drafts: deque[tuple[int, float]] = deque(maxlen=WINDOW)
        self.count = self._made_at = self._plain_at = 0  # steps
        self._costs, self.draft = self.prior, draft

    def record(self, nodes: int, seconds: float, draft_seconds: float, is_by_heads: bool) -> None:
        """Account for a step. seconds: of all but the draft."""
        size = bisect_left(SIZES, nodes)
        self.count += 1
        if nodes == 1:
            self._plain_at = self.count
        self._seen[size] += 1
        if self._seen[size] <= self._skipped:
            return
        self._times[size].append((self.count, seconds))
        if is_by_heads:
            self._drafts.append((self.count, draft_seconds))

    @property
    def plain_seconds(self) -> float:
        """Of a plain step; 0 before any step."""
        return self._scales()[0][1] * self.prior[0] if self.count else 0.0

    @property
    def wants_plain(self) -> bool:
        """Whether a plain step should be taken, to know its time."""
        return (
            len(self._recent(self._times[0])) < LEAST and self.count - self._plain_at >= PLAIN_EVERY
        )

    def costs(self) -> tuple[float, ...]:
        """[n - 1]: of a step of n nodes without its draft, in plain steps, never falling."""
        if self.count > 16 and self.count - self._made_at < 4:
            return self._costs
        self._made_at = self.count
        scales = self._scales()
        places = [log2(n) for n, _ in scales]
        whole = [p * _between(places, scales, log2(n)) for n, p in enumerate(self.prior, start=1)]
        self._costs = tuple(accumulate((max(1.0, value / whole[0]) for value in whole), max))
        drafts = self._recent(self._drafts)
        self.draft = median(drafts) / whole[0] if len(drafts) >= LEAST else self._draft_prior
        return self._costs

    def _scales(self) -> list[tuple[int, float]]:
        """(nodes, seconds over the prior's cost) of the sizes that are known, rising; of all steps
        together where none is."""
        known = [
            (n, median(recent) / self._prior_of(n))
            for n, times in zip(SIZES, self._times, strict=True)
            if len(recent := self._recent(times)) >= LEAST
        ]
        if known:
            return known
        pairs = zip(SIZES, self._times, strict=True)
        few = [s / self._prior_of(n) for n, times in pairs for s in self._recent(times)]
        return [(1, median(few) if few else 1.0)]

    def _recent(self, times: Sequence[tuple[int, float]]) -> list[float]:
        return [seconds for at, seconds in times if self.count - at < STALE]

    def _prior_of(self, nodes: int) -> float:
        return self.prior[min(nodes, len(self.prior)) - 1]


def _between(places: Sequence[float], scales: Sequence[tuple[int, float]], at: float) -> float:
    """Linear interpolation of the scales over their places; beyond the ends those of the ends."""
    right = bisect_left(places, at)
    if right in (0, len(places)):
        return scales[min(right, len(places) - 1)][1]
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return scales[right - 1][1] + share * (scales[right][1] - scales[right - 1][1])


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
    """Decides step by step for one drafter, by costs and by what was accepted.

    *Trust* is the running ratio of accepted nodes to the number expected by average accuracies: it
    scales these before a draft. *Sureness* is the ratio of accepted nodes to the sum of their
    drafted probabilities: it scales those after it.

    *Credit*, in plain steps, limits both: every step adds its tokens, plus SHARE of them, and
    subtracts its cost. A size is used only where its worst case, no node accepted, leaves a credit
    of 0 or more. So after any number of steps

        cost of the steps <= (1 + SHARE) * cost of plain decoding + PATIENCE steps' overhead

    whatever the text. Where plain decoding looks best, drafts are still tried while the credit
    allows. A continuation found in the text (continuation.py) is an offer beside the heads': alone,
    which saves their time, or with them in one tree, whichever promises the most. Its hit rates are
    measured without a draft, so it needs no trial; what it earns pays for no trial of the heads.
    """

    def __init__(self, times: StepTimes, chain: int) -> None:
        """chain: most nodes of a chain of the text, root included."""
        self._by, self._chain = times, chain
        self.trust = 1.0
        self._right, self._said = SURE_START * SURE_WEIGHT, SURE_WEIGHT
        self._is_by_heads = self._is_alone = True  # the step that was allowed last
        self._given = self._spent = 0.0  # a step that the heads draft alone: tokens, and its cost
        self._size = 1  # of a recorded tree, the last one
        self.begin((1.0,), False)
        self.credit = self._trials = self._most

    def begin(self, expected: Sequence[float], is_cut: bool) -> None:
        """For the next answer. expected[m - 1]: tokens a step with the first m nodes, by average
        accuracies. is_cut: each draft is cut by its probabilities; else it has the first nodes."""
        self.expected, self.is_cut = tuple(expected), is_cut
        end = len(expected)
        between = range(1, end) if is_cut else [m for m in SIZES if 8 <= m < end]
        self._sizes = sorted({1, end, *between})
        self._refresh()
        if not self._spent:
            self._given, self._spent = self.expected[-1], self._by_heads[end - 1]

    def allow(self, text: Sequence[float] = ()) -> Allowance:
        """What the next step may draft. text: the probabilities of a continuation's tokens, in
        falling order."""
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
        """Tokens a plain step by the number of nodes; of drafts that are cut what the heads brought
        lately, whatever the sizes were."""
        rates = {1: 1.0}
        if self.is_cut and len(self._sizes) > 1:
            rates[self._sizes[-1]] = self._given / self._spent
            return rates
        for m in self._sizes[1:]:
            rates[m] = (1 + self.trust * self._promised(m)) / self._by_heads[m - 1]
        return rates

    def record(
        self, nodes: int, tokens: int, is_drafted: bool, guessed: int, said: float | None = None
    ) -> None:
        """Account for the step that was allowed last: its nodes, and the tokens it gave, 1 where no
        draft was accepted. is_drafted: whether there was a draft. guessed: the next token, and of
        the others those that the heads had drafted. said: the sum of the heads' probabilities of
        the nodes that were kept, where a draft was cut by them."""
        costs = self._by_heads if self._is_by_heads else self._by_text
        spent = max(1.0, costs[min(nodes, len(costs)) - 1]) if is_drafted else 1.0
        by_heads = guessed if self._is_by_heads else 1
        self.credit = min(self._most, self.credit + (1 + SHARE) * tokens - spent)
        cost = spent if self._is_by_heads else 1.0
        self._trials = max(0.0, min(self._most, self._trials + (1 + SHARE) * by_heads - cost))
        promised = self._promised(len(self.expected) if self.is_cut else nodes)
        if is_drafted and self._is_by_heads and promised > 0:
            self.trust += MEMORY * (min((by_heads - 1) / promised, MOST_TRUST) - self.trust)
        if is_drafted and self._is_alone:
            self._given += CUT_MEMORY * (tokens - self._given)
            self._spent += CUT_MEMORY * (spent - self._spent)
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
        return Learnt(seconds, nodes, told, count, self.trust, self.sureness)

    def _refresh(self) -> None:
        """Take over what was learnt of the costs."""
        costs = self._by.costs()
        self._by_heads = tuple(cost + self._by.draft for cost in costs)
        self._by_text = costs
        end = len(self.expected)
        usual = end if end > 1 else self._chain  # where heads never pay only the text drafts
        self._most = PATIENCE * max(0.5, costs[min(usual, len(costs)) - 1] - 1)

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
        """The best of what the heads may draft, at `rate` tokens a plain step, of the continuation
        alone, and of both."""
        nodes, tokens, alone = self._text_alone(text)
        if found.nodes == 1:
            return alone or found
        end, costs = len(self.expected), self._by_heads
        beside = self._given - 1 if self.is_cut else self.trust * self._promised(end)
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
