"""Throttle: failures counted, so that nobody can guess a password."""

import time
from collections import deque
from collections.abc import Callable

SLOW_DOWN = "Too many wrong passwords. Wait a minute and try again."


class Throttle:
    """At most `each` failures a minute of one address, `all` of everybody."""

    def __init__(
        self,
        each: int = 5,
        all: int = 30,
        seconds: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._each, self._all, self._seconds, self._clock = each, all, seconds, clock
        self._failures: deque[tuple[float, str]] = deque()

    def is_shut(self, address: str, is_stranger: bool = True) -> bool:
        """Whether this address must wait: for its own failures, a stranger for everybody's too."""
        while self._failures and self._failures[0][0] < self._clock() - self._seconds:
            self._failures.popleft()
        mine = sum(1 for _, other in self._failures if other == address)
        return mine >= self._each or (is_stranger and len(self._failures) >= self._all)

    def count(self, address: str) -> None:
        """A failure of this address."""
        self._failures.append((self._clock(), address))

    def forgive(self, address: str) -> None:
        """The newest failure of this address was none."""
        for failure in reversed(self._failures):
            if failure[1] == address:
                return self._failures.remove(failure)
