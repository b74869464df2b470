"""Ranges: fields of a dataclass that are numbers, and which values they take."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

from medusa_chat.errors import UsageError


@dataclass(frozen=True)
class Range:
    """The values of a number: from low to high, or to below high; whole ones where low is whole."""

    low: float
    high: float
    is_open: bool = False

    @property
    def kinds(self) -> tuple[type, ...]:
        """The types of its values."""
        return (int,) if isinstance(self.low, int) else (int, float)

    def __str__(self) -> str:
        if isinstance(self.low, int):
            return f"a whole number from {self.low} to {self.high}"
        return f"a number from {self.low:g} to {'below ' if self.is_open else ''}{self.high:g}"


def within(low: float, high: float, default: float | None, is_open: bool = False) -> Any:
    """A field of a dataclass that is a number, with its range."""
    return field(default=default, metadata={"range": Range(low, high, is_open)})


def require_ranges(settings: Any, called: Callable[[str], str] = str) -> None:
    """Raises UsageError unless the value of every field that `within` made is in its range, or
    left open (None) where that is the default. called: what the message calls a field."""
    for one in fields(settings):
        value, allowed = getattr(settings, one.name), one.metadata.get("range")
        if allowed is None or (value is None and one.default is None):
            continue
        is_number = isinstance(value, allowed.kinds) and not isinstance(value, bool)
        is_within = is_number and allowed.low <= value <= allowed.high
        if not is_within or (allowed.is_open and value == allowed.high):
            raise UsageError(f"{called(one.name)} is {value!r}: give {allowed}")
