"""GgufReader: the numbers and texts of a GGUF header one after another, none beyond its end."""

import struct
from typing import Any

from medusa_chat.checkpoints.layouts.source import Source

CHUNK = 1 << 20
MAX_HEADER = 64_000_000  # bytes; 262,144 tokens with their merges take 14 MB
MAX_TEXT = 1 << 20  # bytes of a text
MAX_TEXTS = 2_000_000  # of all arrays: the largest known has 262,144 tokens and 514,906 merges


class Broken(Exception):
    """What is wrong with a file, as the end of a sentence."""


class GgufReader:
    """The bytes of a header, one after another; only what is asked for is read."""

    def __init__(self, source: Source, file: str, size: int) -> None:
        self._source, self._file = source, file
        self._most = min(size, MAX_HEADER)
        self._is_long = size > MAX_HEADER
        self.data = bytearray()
        self.place = 0
        self._texts = 0

    def take(self, length: int) -> int:
        """The place of the next `length` bytes in `data`, which are there from now on."""
        start, end = self.place, self.place + length
        if end > self._most:
            long = f"its header is larger than {MAX_HEADER} bytes"
            raise Broken(long if self._is_long else "it is cut short, or a length in it is wrong")
        while len(self.data) < end:
            piece = self._source.read(self._file, len(self.data), CHUNK)
            if not piece:
                raise Broken("it is cut short")
            self.data += piece
        self.place = end
        return start

    def numbers(self, form: str, count: int = 1) -> tuple[Any, ...]:
        whole = f"<{count}{form}"
        return struct.unpack_from(whole, self.data, self.take(struct.calcsize(whole)))

    def number(self, form: str) -> Any:
        return self.numbers(form)[0]

    def text(self, most: int, what: str) -> str:
        length = self.number("Q")
        if length > most:
            raise Broken(f"{what} has {length} bytes: at most {most} are allowed")
        start = self.take(length)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise Broken(f"{what} is not UTF-8") from error

    def skip_texts(self, count: int, what: str) -> None:
        """Texts that nobody needs here; the tokenizer will, which takes ten times as long."""
        self._texts += count
        if self._texts > MAX_TEXTS:
            raise Broken(
                f"{what} brings its texts to {self._texts}: at most {MAX_TEXTS} are allowed"
            )
        for _ in range(count):
            self.text(MAX_TEXT, f"a text of {what}")
