"""The shortlist: the tokens that the heads may draft, those that most answers are made of."""

from collections import Counter
from collections.abc import Iterable, Sequence

SHARE = 0.98  # of the answers' tokens that are in the list
STRIDE = 256  # the list's length is a multiple of this
EACH = 16  # tokens of answers that are needed for each token of the list


def shortlist(answers: Iterable[Sequence[int]], vocabulary: int) -> tuple[int, ...]:
    """Token ids in rising order: the fewest that make up SHARE of the answers, rounded up to a
    multiple of STRIDE with the next frequent ones. Empty where the list would save little, above
    half of the vocabulary, and where the answers are too few to tell."""
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
