"""CleanStream: what is printed, without what a terminal would obey in the texts of strangers."""

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# Controls but newline and tab; DEL; C1 controls; what changes the direction of a line.
UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def clean(text: str) -> str:
    """The text as a terminal may show it: each unsafe character is U+FFFD."""
    return UNSAFE.sub("\ufffd", text)


class CleanStream:
    """stdout or stderr of a process: all that is printed passes here, whoever prints it. exact: the
    stream itself, for escape codes of our own, and for data that no terminal gets."""

    def __init__(self, exact: TextIO) -> None:
        self.exact = exact

    def write(self, text: str) -> int:
        """As a stream's, of the cleaned text."""
        self.exact.write(clean(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """As a stream's, of the cleaned lines."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exact, name)


def clean_output() -> None:
    """Have all that this process prints from now on pass a CleanStream."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, CleanStream):
            setattr(sys, name, CleanStream(stream))


def exact(stream: Any) -> Any:
    """The stream behind a CleanStream; any other as it is."""
    return stream.exact if isinstance(stream, CleanStream) else stream
