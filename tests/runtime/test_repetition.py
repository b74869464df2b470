"""Where an answer begins to repeat itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medusa_chat.runtime.repetition import LEAST, repeats_from


@pytest.mark.parametrize("period", [1, 7, 40])
def test_the_repeated_passage_is_found_where_it_is_said_again(period):
    begin, passage = list(range(100, 150)), list(range(period))
    ids = begin + passage * (4 + LEAST // period)
    assert repeats_from(ids) == 50 + period
    assert repeats_from(ids[:-1]) == 50 + period  # cut in the middle of the passage
    assert repeats_from([*ids, 999]) is None  # it found something else to say


@pytest.mark.parametrize(
    "ids", [[], [1], list(range(500)), [1, 2] * 3, [*range(40), *range(40)], [5] * LEAST]
)
def test_a_short_or_single_repetition_is_none(ids):
    assert repeats_from(ids) is None


@given(st.lists(st.integers(0, 2), max_size=120))
def test_what_repeats_is_the_longest_that_a_plain_search_finds(ids):
    def run(period):  # tokens from the end that equal those one period before
        count = 0
        while count + period < len(ids) and ids[-1 - count] == ids[-1 - count - period]:
            count += 1
        return count

    runs = [run(p) for p in range(1, len(ids) // 3 + 1) if run(p) >= max(LEAST, 2 * p)]
    assert repeats_from(ids) == (len(ids) - max(runs) if runs else None)
