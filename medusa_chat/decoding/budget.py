"""Budget: decides how much each step drafts, so that drafts save more than they cost. No torch.

The unit is a plain step: a cost of 1.3 is 1.3 times the time of a step without a draft. Costs are
learnt from the steps of answers (StepTimes), expected tokens from the drafter's probabilities and
how many were accepted. There are no extra timings, and what was learnt is lost with the model.
"""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, inf, log, log2
from statistics import median

from medusa_chat.decoding.events import Learnt

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # whose costs are learnt
RECENT = 7  # steps whose median is the machine's current speed; few, since it changes
PRIOR_STEPS = 3  # weight of the prior, in steps
LEAST_WEIGHT = 1 / 24  # of one step in its size's cost, so that a changed machine is relearnt
JUMP = 0.5  # largest correction from one step (a logarithm): one slow step proves little
PLAIN_EVERY, MOST_EVERY = 8, 256  # drafted steps before a plain one is taken: at first, at most
CREDIT = 3.0  # plain steps that drafts may lose; with SHARE less than 3 % of 256 tokens
SHARE = 0.015  # of plain decoding's time that drafts may also cost, so that they are tried again
GAIN_WEIGHT = 1 / 24  # of one step in the gain of drafts; fewer steps are noise
TRUST_WEIGHT = 1 / 64  # of one step in the correction of probabilities
TRUST, TRUST_TOKENS = 0.85, 4.0  # initial correction (drafters are overconfident), its weight
MOST_TRUST = 1.5
TRIED = 48  # drafted steps after which two drafters are compared
STAY = 1.03  # gain that justifies another size of a recorded tree: each size is recorded anew
# reasons for a step's number of nodes
WHOLE, PART, SOME, TRIAL = "all", "the most tokens a second", "what is left to spend", "trial"
HEADS, TEXT = "the drafter's probabilities", "what the text repeats"
BOTH = "the drafter's probabilities and what the text repeats"
NO_PAY, SPENT = "off: drafts would not pay", "off: drafts have cost what they may"
TIMED = "off: a plain step, to know its time"


class StepTimes:
    """The cost of a model's steps by their number of nodes, learnt from each step.

    A step's time is the machine's current speed times the cost of the step's size. The speed is the
    median of the latest steps of all sizes, so only steps close in time are compared, and neither a
    busy moment nor a longer text changes a cost. A cost is the prior's, corrected by a running
    mean; sizes that were never used are corrected like their neighbours.
    """

    def __init__(self, prior: Sequence[float], draft: float = 0.0, skipped: int = 0) -> None:
        """prior[n - 1]: cost of a step of n nodes, from 1 and never falling. draft: cost of the
        heads. Both in plain steps. skipped: the first steps of a size, which run slower."""
        self.prior, self.draft, self._skipped = tuple(prior), draft, skipped
        self.count = self._drafts = self._plain_at = 0  # steps
        self._seen = [0] * len(SIZES)
        self._corrections = [0.0] * len(SIZES)  # logarithms, as are the speeds
        self._speeds: deque[float] = deque(maxlen=RECENT)
        self._costs: tuple[float, ...] | None = self.prior

    def record(self, nodes: int, seconds: float, draft_seconds: float, is_by_heads: bool) -> None:
        """Learn from a step. seconds: its time without the draft."""
        size = min(bisect_left(SIZES, nodes), len(SIZES) - 1)
        self.count += 1
        self._seen[size] += 1
        if nodes == 1:
            self._plain_at = self.count
        seen = self._seen[size] - self._skipped
        if seen <= 0 or seconds <= 0:
            return
        cost = log(self.prior[min(nodes, len(self.prior)) - 1]) + self._corrections[size]
        speed = median(self._speeds or (log(seconds) - cost,))  # of those before this one
        surprise = log(seconds) - cost - speed
        self._speeds.append(log(seconds) - cost)
        self._corrections[size] += _weight(seen) * max(-JUMP, min(JUMP, surprise))
        self._correct_unused()
        if is_by_heads:
            self._drafts += 1
            draft = min(draft_seconds / exp(speed + self._corrections[0]), 4 * self.draft + 0.1)
            self.draft += _weight(self._drafts) * (draft - self.draft)
        if self.count < 16 or self.count % 4 == 0:  # one step hardly changes the table
            self._costs = None

    @property
    def plain_seconds(self) -> float:
        """The current time of a plain step; 0 before any step."""
        return exp(median(self._speeds) + self._corrections[0]) if self._speeds else 0.0

    @property
    def wants_plain(self) -> bool:
        """Whether a plain step is due, to measure its time."""
        return self.count - self._plain_at >= min(PLAIN_EVERY * (1 + self._seen[0]), MOST_EVERY)

    def costs(self) -> tuple[float, ...]:
        """[n - 1]: of a step of n nodes without its draft, in plain steps, never falling."""
        if self._costs is None:
            factors = [exp(value - self._corrections[0]) for value in self._corrections]
            whole = (c * _between(SIZES, factors, n) for n, c in enumerate(self.prior, start=1))
            self._costs = tuple(accumulate((max(1.0, cost) for cost in whole), max))
        return self._costs

    def _correct_unused(self) -> None:
        """Correct the sizes that had no step like their neighbours."""
        used = [i for i, seen in enumerate(self._seen) if seen > self._skipped]
        places = [log2(SIZES[i]) for i in used]
        values = [self._corrections[i] for i in used]
        for i in set(range(len(SIZES))) - set(used):
            self._corrections[i] = _between(places, values, log2(SIZES[i]))


class PassCost:
    """What a pass of a drafter costs, in plain steps, learnt from its drafts: for a drafter that
    runs once for each depth, so that a longer draft costs more."""

    def __init__(self, prior: float) -> None:
        self.value, self._seen = prior, 0

    def record(self, seconds: float, passes: float, plain_seconds: float) -> None:
        """Learn from a draft of so many passes."""
        if passes > 0 and plain_seconds > 0:
            self._seen += 1
            cost = min(seconds / passes / plain_seconds, 4 * self.value + 0.1)
            self.value += _weight(self._seen) * (cost - self.value)


def _weight(seen: int) -> float:
    """Of one step in a running mean over `seen` steps."""
    return max(1 / (seen + PRIOR_STEPS), LEAST_WEIGHT)


def _between(places: Sequence[float], values: Sequence[float], at: float) -> float:
    """Linear interpolation; constant beyond the ends."""
    right = bisect_left(places, at)
    if right in (0, len(places)):
        return values[min(right, len(places) - 1)]
    share = (at - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one step may draft: at most `nodes` nodes including the root, and the reason, which the
    step's event has. For cutting a draft by its probabilities: costs[m - 1] of a step of m nodes
    with its draft; rate: tokens that the time of a plain step should give; trust: factor on the
    drafter's probabilities. by_heads, by_text: the sources of the draft, the drafter and the text.
    per_pass: the cost of a pass of a drafter that runs several times, which is then not in `costs`.
    """

    nodes: int
    reason: str
    costs: tuple[float, ...] = ()
    rate: float = 0.0
    trust: float = 1.0
    by_heads: bool = True
    by_text: bool = False
    per_pass: float = 0.0

    def pays(self, probability: float, nodes: int) -> bool:
        """Whether another pass of the drafter pays, which finds a node of this probability at most,
        for a draft that has so many nodes."""
        if not self.costs:
            return True
        more = self.costs[min(nodes, len(self.costs) - 1)] - self.costs[nodes - 1]
        return probability * self.trust > self.rate * (self.per_pass + more)

    def cut(self, probabilities: Sequence[float]) -> int:
        """How many of a draft's nodes to keep; without costs, as many as are allowed.
        probabilities: of the nodes after the root, descending."""
        if not self.costs:
            return min(len(probabilities), self.nodes - 1)
        count, total, most = 0, 1.0, 1.0 - self.rate * self.costs[0]
        for number, probability in enumerate(probabilities[: self.nodes - 1], start=1):
            total += probability
            value = total - self.rate * self.costs[number]
            if value > most:
                most, count = value, number
        return count


class Budget:
    """Decides step by step for one drafter: `allow` before a draft, `Allowance.cut` after it.

    The heads draft if that gives the most tokens per plain step's time: for drafts that are cut,
    judged by their recent tokens over their cost; for a fixed tree, by the accuracies of its nodes.
    *Trust* is the number of accepted nodes over the number that the drafter's probabilities, or
    those accuracies, promised; it scales both.

    *Credit*, in plain steps, is the limit: every step adds its tokens, plus SHARE of them, and
    subtracts its cost. A size is used only if its worst case, no node accepted, leaves a credit of
    0 or more. So after any number of steps, whatever the text,

        cost of the steps <= (1 + SHARE) * cost of plain decoding + CREDIT

    While plain decoding looks best, drafts are still tried as far as the credit allows. A
    continuation from the text (continuation.py) is drafted alone or with the heads, whichever
    promises more. Its hit rates are measured without drafting, so it needs no trials, and its gains
    do not pay for trials of the heads.
    """

    def __init__(self, times: StepTimes, pass_cost: PassCost | None = None) -> None:
        """pass_cost: of a drafter that runs once for each depth; None for one whose draft costs
        what `times` has learnt of it."""
        self.times, self.pass_cost = times, pass_cost
        self.credit = self._trials = CREDIT  # trials: the credit without the text's gains
        self._accepted, self._promised = TRUST * TRUST_TOKENS, TRUST_TOKENS
        self._given = self._spent = 1.0  # running means of steps drafted by the heads alone
        self._drafted = 0  # steps of these
        self._is_by_heads = self._is_alone = True  # the step that was allowed last
        self._size = 1  # of a recorded tree, the last one
        self.begin((1.0,), False)

    def begin(self, expected: Sequence[float], is_cut: bool) -> None:
        """Begin the next answer. expected[m - 1]: mean tokens per step with the first m nodes.
        is_cut: each draft is cut by its probabilities; otherwise it has the first nodes."""
        self.expected, self.is_cut = tuple(expected), is_cut
        end = len(expected)
        between = [m for m in SIZES if 8 <= m < end and not is_cut]
        self._sizes = sorted({1, min(2, end) if is_cut else 1, end, *between})
        self._refresh()

    def allow(self, text: Sequence[float] = ()) -> Allowance:
        """What the next step may draft. text: a continuation's probabilities, descending."""
        self._refresh()
        if self.times.wants_plain:
            self._is_by_heads = True
            return Allowance(1, TIMED)
        rates = self._rates()
        best = max(rates, key=rates.__getitem__)  # of equals the smallest
        if not self.is_cut and rates.get(self._size, 0.0) * STAY > rates[best]:
            best = self._size
        self._size = best
        allowance = self._of_heads(best, rates[best])
        if text:
            allowance = self._with_text(allowance, text, rates[best])
        self._is_by_heads = allowance.by_heads
        self._is_alone = allowance.by_heads and not allowance.by_text
        return allowance

    def record(
        self,
        nodes: int,
        tokens: int,
        is_drafted: bool,
        guessed: int,
        said: float | None = None,
        passes: float = 1.0,
    ) -> None:
        """Record the step that was allowed last: its nodes, and its tokens (1 if no draft was
        accepted). is_drafted: whether there was a draft. guessed: the tokens without those that
        only the text proposed. said: the sum of the drafter's probabilities of the kept nodes, if
        they cut the draft. passes: of the drafter."""
        is_drafted = is_drafted or (self.pass_cost is not None and passes > 0)
        costs = self._by_heads if self._is_by_heads and not self.pass_cost else self._by_text
        spent = max(1.0, costs[min(nodes, len(costs)) - 1]) if is_drafted else 1.0
        spent += self.pass_cost.value * passes if self.pass_cost else 0.0
        earned, lost = (guessed, spent) if self._is_by_heads else (1, 1.0)
        self.credit = min(CREDIT, self.credit + (1 + SHARE) * tokens - spent)
        self._trials = max(0.0, min(CREDIT, self._trials + (1 + SHARE) * earned - lost))
        if not (is_drafted and self._is_by_heads):
            return
        promised = self.expected[min(nodes, len(self.expected)) - 1] - 1 if said is None else said
        self._promised += promised - TRUST_WEIGHT * self._promised
        self._accepted += guessed - 1 - TRUST_WEIGHT * self._accepted
        if self._is_alone:
            self._drafted += 1
            self._given += GAIN_WEIGHT * (tokens - self._given)
            self._spent += GAIN_WEIGHT * (spent - self._spent)

    @property
    def trust(self) -> float:
        """Factor on the drafter's probabilities."""
        return min(self._accepted / max(self._promised, 1e-9), MOST_TRUST)

    @property
    def gain(self) -> float:
        """Tokens of the drafter's lately drafted steps for each plain step's time; without limit
        until TRIED of them are known."""
        return self._given / self._spent if self._drafted >= TRIED else inf

    @property
    def learnt(self) -> Learnt:
        """What it has learnt, for the last event of an answer."""
        self._refresh()
        costs = self._by_text if self.expected == (1.0,) else self._by_heads
        nodes = tuple(n for n in SIZES if n <= min(64, len(costs)))
        shown = (1.0, *(costs[n - 1] for n in nodes[1:]))
        return Learnt(self.times.plain_seconds, nodes, shown, self.times.count, self.trust)

    def _refresh(self) -> None:
        """Read the current costs."""
        self._by_text = self.times.costs()
        if self.pass_cost is None:
            self._by_heads = tuple(cost + self.times.draft for cost in self._by_text)
        else:
            pairs = enumerate(self._by_text)  # at most a pass for each node
            self._by_heads = tuple(cost + self.pass_cost.value * n for n, cost in pairs)

    def _rates(self) -> dict[int, float]:
        """Number of nodes -> tokens per plain step's time; cut drafts count as the largest size."""
        rates = {1: 1.0}
        if self.is_cut and len(self.expected) > 1:
            rates[len(self.expected)] = self._given / self._spent
        elif not self.is_cut:
            for m in self._sizes[1:]:
                rates[m] = (1 + self.trust * (self.expected[m - 1] - 1)) / self._by_heads[m - 1]
        return rates

    def _of_heads(self, best: int, rate: float) -> Allowance:
        """What the heads may draft. best: the size with the highest rate, `rate`."""
        if len(self._sizes) == 1:
            return Allowance(1, NO_PAY)
        credit = self.credit if best > 1 else min(self.credit, self._trials)
        affordable = max(1, bisect_right(self._by_heads, 1.0 + credit))
        if self.is_cut and affordable > 1:
            costs = self._by_text if self.pass_cost else self._by_heads
            per_pass = self.pass_cost.value if self.pass_cost else 0.0
            if best > 1:
                return Allowance(affordable, HEADS, costs, rate, self.trust, per_pass=per_pass)
            trust = max(self.trust, TRUST)  # without drafts, trust would never recover
            return Allowance(affordable, TRIAL, costs, rate, trust, per_pass=per_pass)
        wanted = best if best > 1 else self._sizes[1]  # a trial: the text may be easier by now
        nodes = max(m for m in self._sizes if m <= min(wanted, affordable))
        if nodes == 1:
            return Allowance(1, NO_PAY if best == 1 else SPENT)
        chosen = WHOLE if nodes == self._sizes[-1] else PART
        return Allowance(nodes, TRIAL if best == 1 else SOME if nodes < wanted else chosen)

    def _with_text(self, heads: Allowance, text: Sequence[float], rate: float) -> Allowance:
        """The best of the heads' draft, which has the rate `rate`, the text's draft, and both."""
        nodes, tokens, alone = self._text_alone(text)
        if heads.nodes == 1:
            return alone or heads
        end, costs = len(self.expected), self._by_heads
        beside = self._given if self.is_cut else 1 + self.trust * (self.expected[-1] - 1)
        tokens += (1 - text[0]) * (beside - 1)
        cost = costs[min(end + nodes, len(costs)) - 1]
        if self.pass_cost is not None:  # its usual draft is far shorter than the longest
            cost = self._spent + self._by_text[nodes] - 1.0
        rate = max(rate, tokens / cost)
        if alone is not None and alone.rate >= rate:
            return alone
        if text[0] < rate * (self._by_text[1] - self._by_text[0]):
            return heads  # the text's first node would not pay for its time
        reason = TRIAL if heads.reason == TRIAL else BOTH
        return replace(heads, reason=reason, rate=rate, by_text=True)

    def _text_alone(self, text: Sequence[float]) -> tuple[int, float, Allowance | None]:
        """For a continuation alone: (the number of nodes that pays best, their expected tokens,
        what the step may draft; None if it would not pay)."""
        costs, affordable = self._by_text, bisect_right(self._by_text, 1.0 + self.credit)
        totals = list(accumulate(text, initial=1.0))
        values = [t / c for t, c in zip(totals[: max(affordable, 1)], costs, strict=False)]
        count = max(range(len(values)), key=values.__getitem__)
        if not count:
            return 0, totals[-1], None
        allowance = Allowance(count + 1, TEXT, costs, values[count], 1.0, False, True)
        return count, totals[count], allowance
