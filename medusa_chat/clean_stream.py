"""CleanStream: printed text without the control characters that a terminal would execute."""

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# Control characters except newline and tab; DEL; C1 controls; direction marks.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """The text with every unsafe character replaced by U+FFFD."""
    return UNSAFE.sub("\ufffd", text)


class CleanStream:
    """Cleans everything that is printed to stdout or stderr. exact: the wrapped stream, for our own
    escape codes and for data that no terminal shows."""

    def __init__(self, exact: TextIO) -> None:
        self.exact = exact

    def write(self, text: str) -> int:
        """Write the cleaned text."""
        self.exact.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write the cleaned lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)


def clean_output() -> None:
    """Wrap stdout and stderr of this process in a CleanStream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, CleanStream):
            setattr(sys, name, CleanStream(stream))


def exact(stream: Any) -> Any:
    """The stream that a CleanStream wraps; any other stream unchanged."""
    return stream.exact if isinstance(stream, CleanStream) else stream
