"""Continuation: what the text itself says comes next, and how often that was right. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

DEPTH = 15  # tokens of a guess: with the root the rows of one tile
MEMORY = 1 / 12  # weight of one token in a running hit rate
LEAST = 0.05  # a token that is less probable is not guessed
# hit rates by the number of tokens that match, before anything was measured; the last one: or more
PRIOR = (0.0, 0.1, 0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)
LONG = 4  # tokens of a match that is followed while it is right, and looked for before shorter ones


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation found in the text: its tokens, and the hit rate of each after the one before
    it; reached: how probable each is with all before it, the products of the rates."""

    tokens: tuple[int, ...]
    rates: tuple[float, ...]
    reached: tuple[float, ...]


class Continuation:
    """Follows a match of the text's end with an earlier place of the text.

    A match of LONG tokens or more grows while the tokens that come are those after its place. Else
    the next match is the latest place of the last LONG tokens, of the last two, or of the last one;
    without one nothing is guessed. Every token of an answer tells whether the match was right,
    drafted or not, so the hit rates by the match's length are measured without a draft. It takes a
    few microseconds a token: a small model's step takes some hundred.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._rates = list(PRIOR)
        self._place = self._length = 0  # of the match: the place after it, and its tokens
        self._latest: dict[tuple[int, ...], int] = {}  # place after these one, two or LONG tokens

    def read(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the text, at first the prompt, whose hits are not counted."""
        ids, is_answer = self._ids, bool(self._ids)
        for token in tokens:
            length = self._length
            is_right = length > 0 and ids[self._place] == token
            if length and is_answer:
                at = min(length, len(PRIOR) - 1)
                self._rates[at] += MEMORY * (is_right - self._rates[at])
            place = self._append(token)
            if is_right and length >= LONG:
                self._place, self._length = self._place + 1, length + 1
            else:
                self._place, self._length = place, self._matching(place) if place else 0

    def guess(self, depth: int) -> Guess | None:
        """At most `depth` tokens, of which each is probable enough; None where none is."""
        rates: list[float] = []
        reached: list[float] = []
        probability = 1.0
        for length in range(self._length, self._length + min(depth, DEPTH)):
            rate = self._rates[min(length, len(PRIOR) - 1)]
            probability *= rate
            if probability < LEAST:
                break
            rates.append(rate)
            reached.append(probability)
        if not rates:
            return None
        tokens = self._followed(len(rates))
        return Guess(tuple(tokens), tuple(rates), tuple(reached))

    def following(self, count: int) -> Sequence[int]:
        """The next `count` tokens by the match, at most DEPTH; none without a match of which one is
        probable enough."""
        rate = self._rates[min(self._length, len(PRIOR) - 1)]
        return self._followed(min(count, DEPTH)) if rate >= LEAST else ()

    def _followed(self, count: int) -> Sequence[int]:
        """What came after the match's place; one that overlaps the text's end goes on as the period
        that it is."""
        span = self._ids[self._place : self._place + count]
        return (span * -(-count // max(len(span), 1)))[:count]

    def _append(self, token: int) -> int:
        """Add a token -> the latest earlier place after the last LONG tokens, else the last two,
        else the last one; 0 where there is none."""
        ids, latest = self._ids, self._latest
        ids.append(token)
        last, pair, one = tuple(ids[-LONG:]), tuple(ids[-2:]), (token,)
        place = latest.get(last) or latest.get(pair) or latest.get(one, 0)
        latest[last] = latest[pair] = latest[one] = len(ids)
        return place

    def _matching(self, place: int) -> int:
        """How many tokens before `place` are those at the end of the text, counted up to where the
        rates end; one or more, since a token led there."""
        ids, length, most = self._ids, 1, min(len(PRIOR) - 1, place)
        while length < most and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
