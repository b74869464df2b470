"""Continuation: predicts the next tokens from repetitions in the text, with hit rates. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

DEPTH = 15  # most tokens of a guess: with the root, the 16 rows of one tile
MEMORY = 1 / 12  # weight of one token in a running hit rate
LEAST = 0.05  # the probability below which a token is not guessed
# initial hit rates by the number of matching tokens; the last one also for longer matches
PRIOR = (0.0, 0.1, 0.3, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)
LONG = 4  # length of a match that is preferred, and followed as long as it is right


@dataclass(frozen=True, slots=True)
class Guess:
    """A continuation from the text. rates: the hit rate of each token given the one before it.
    reached: the probability of each token with all before it, the products of the rates."""

    tokens: tuple[int, ...]
    rates: tuple[float, ...]
    reached: tuple[float, ...]


class Continuation:
    """Follows an earlier occurrence of the text's last tokens (a match).

    A match of LONG tokens or more is followed as long as its next tokens are right. Otherwise the
    next match is the latest occurrence of the last LONG tokens, of the last two, or of the last
    one; without a match nothing is guessed. Every token of an answer shows whether the match was
    right, drafted or not, so hit rates by match length are measured without drafting. This takes a
    few microseconds per token; a small model's step takes a few hundred.
    """

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._rates = list(PRIOR)
        self._place = self._length = 0  # the place after the match, and its number of tokens
        self._latest: dict[tuple[int, ...], int] = {}  # place after these one, two or LONG tokens

    def read(self, tokens: Sequence[int]) -> None:
        """Add the next tokens of the text, first the prompt, whose hits are not counted."""
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
        """At most `depth` tokens that are probable enough; None if there are none."""
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
        """The next `count` tokens of the match, at most DEPTH; none if improbable."""
        rate = self._rates[min(self._length, len(PRIOR) - 1)]
        return self._followed(min(count, DEPTH)) if rate >= LEAST else ()

    def _followed(self, count: int) -> Sequence[int]:
        """The tokens after the match; one that overlaps the text's end is repeated periodically."""
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
        """How many tokens before `place` equal the last tokens of the text, counted as far as the
        rates distinguish; at least one."""
        ids, length, most = self._ids, 1, min(len(PRIOR) - 1, place)
        while length < most and ids[place - 1 - length] == ids[-1 - length]:
            length += 1
        return length
