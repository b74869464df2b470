"""From token ids to printable text: streaming decoding, stop strings, the text of one token."""

from collections.abc import Sequence
from typing import Any

from tokenizers.decoders import DecodeStream


class TextStream:
    """Token ids in, printable text out.

    An incomplete character, and text that may be the beginning of a stop string, is held back; at
    the end so is a U+FFFD of the answer's own, which looks like one. Nothing is given from a stop
    string on.

    >>> stream = TextStream(tokenizer, stop=("###",))
    >>> text = "".join(stream.push(token) for token in ids) + stream.tail()
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str] = ()) -> None:
        """tokenizer: a fast transformers tokenizer."""
        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that is complete with this token; "" after a stop string."""
        piece = self._stream.step(self._backend, token)
        if self.is_stopped or not piece:
            return ""
        if not self._stop:
            return piece
        self._held += piece
        found = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        cut = len(self._held) - self._held_back()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def tail(self) -> str:
        """The text held back for stop strings, after the last token."""
        held, self._held = self._held, ""
        return held

    def _held_back(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max((len(text) - 1 for text in self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0


class TokenTexts:
    """The text of single tokens, cached; a byte that is not a whole character shows as <0xE2>."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._text(token)
        return self._texts[token]

    def _text(self, token: int) -> str:
        text = self.tokenizer.decode([token])
        piece = self.tokenizer.convert_ids_to_tokens(token) or ""
        if "\ufffd" in text:
            table = _byte_table()
            return "".join(f"<0x{table[c]:02X}>" if c in table else c for c in piece)
        return " " + text.lstrip(" ") if piece.startswith("\u2581") else str(text)


def _byte_table() -> dict[str, int]:
    """Maps the printable character that byte-level BPE writes for a byte to that byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}
