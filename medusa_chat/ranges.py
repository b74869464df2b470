"""Range: the allowed values of numeric fields of a dataclass, and their check."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from medusa_chat.errors import UsageError


@dataclass(frozen=True)
class Range:
    """Numbers from low to high, without high if is_open; integers if low is one."""

    low: float
    high: float
    is_open: bool = False

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of allowed values."""
        return (int,) if isinstance(self.low, int) else (int, float)

    def __str__(self) -> str:
        if isinstance(self.low, int):
            return f"a whole number from {self.low} to {self.high}"
        return f"a number from {self.low:g} to {'below ' if self.is_open else ''}{self.high:g}"


def within(low: float, high: float, default: float | None, is_open: bool = False) -> Any:
    """A numeric field of a dataclass, with its range."""
    return field(default=default, metadata={"range": Range(low, high, is_open)})


def require_ranges(settings: Any, called: Callable[[str], str] = str) -> None:
    """Raises UsageError unless every field made by `within` is in its range, or None if that is its
    default. called: the name of a field in the message."""
    for one in fields(settings):
        value, allowed = getattr(settings, one.name), one.metadata.get("range")
        if allowed is None or (value is None and one.default is None):
            continue
        is_number = isinstance(value, allowed.kinds) and not isinstance(value, bool)
        is_within = is_number and allowed.low <= value <= allowed.high
        if not is_within or (allowed.is_open and value == allowed.high):
            raise UsageError(f"{called(one.name)} is {value!r}: give {allowed}")
