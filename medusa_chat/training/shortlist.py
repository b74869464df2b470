"""Which tokens drafts need to have: those that answers are made of."""

from collections import Counter
from collections.abc import Iterable, Sequence

SHARE = 0.98  # of the answers' tokens that the list holds
STRIDE = 256  # its length is a multiple of this
EACH = 16  # tokens of answers that must be there for each of the list


def shortlist(answers: Iterable[Sequence[int]], vocabulary: int) -> tuple[int, ...]:
    """Token ids in rising order: the fewest that make up SHARE of the answers, rounded up with the
    next likely ones. Empty where it would not be worth it, over half of the vocabulary, or where
    too few tokens were seen to say."""
    counts: Counter[int] = Counter()
    for ids in answers:
        counts.update(ids)
    total, seen, needed = counts.total(), 0, 0
    ranked = sorted(counts, key=lambda token: (-counts[token], token))
    for token in ranked:
        if seen >= SHARE * total:
            break
        seen, needed = seen + counts[token], needed + 1
    length = min(-(-needed // STRIDE) * STRIDE, len(ranked))
    if not needed or 2 * length > vocabulary or total < EACH * length:
        return ()
    return tuple(sorted(ranked[:length]))
