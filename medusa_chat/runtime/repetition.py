"""Repetition: where an answer begins to say only what it has said before."""

from collections.abc import Sequence

LEAST = 24  # tokens that repeat: fewer are a line of dashes, or a row of a table
COPIES = 2  # times at least that the passage is said again
WINDOW = 8192  # tokens from the end that are looked at


def repeats_from(ids: Sequence[int]) -> int | None:
    """The index of the first token from which on the rest of an answer only repeats the passage
    right before it, at least COPIES times and LEAST tokens; None where its end is no repetition.
    """
    back = list(reversed(ids[-WINDOW:]))
    alike = _prefix_lengths(back)
    found = 0  # tokens at the end that only repeat
    for period in range(1, len(back) // (COPIES + 1) + 1):
        repeated = alike[period]
        if repeated >= max(LEAST, COPIES * period):
            found = max(found, repeated)
    return len(ids) - found if found else None


def _prefix_lengths(row: Sequence[int]) -> list[int]:
    """For each place, how many items from there on are those that the row begins with (the
    Z-function, in linear time)."""
    lengths = [len(row), *[0] * (len(row) - 1)] if row else []
    left = right = 0
    for place in range(1, len(row)):
        same = min(right - place, lengths[place - left]) if place < right else 0
        while place + same < len(row) and row[same] == row[place + same]:
            same += 1
        lengths[place] = same
        if place + same > right:
            left, right = place, place + same
    return lengths
