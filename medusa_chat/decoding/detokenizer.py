"""From token ids to printable text: streaming decoding, stop strings, the text of one token."""

import codecs
import re
from collections.abc import Callable, Sequence
from os.path import commonprefix
from typing import Any

STRAY = "\ufffd"  # shown for an invalid byte
BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # a byte in vocabularies with byte fallback


class TextStream:
    """Token ids in, printable text out.

    Text once returned never changes. An incomplete character, and text that may begin a stop
    string, is held back until it is complete or ruled out; invalid bytes become U+FFFD. Nothing is
    returned from a stop string on. Otherwise the pieces and the tail are what the tokenizer
    decodes, except that characters already shown are kept if the byte tokens after them turn out to
    be invalid.

    >>> stream = TextStream(TokenTexts(tokenizer), stop=("###",))
    >>> text = "".join(stream.push(token) for token in ids) + stream.tail()
    """

    def __init__(self, texts: "TokenTexts", stop: Sequence[str] = ()) -> None:
        self._pieces, self._special = texts.pieces, texts.special
        self._characters = codecs.getincrementaldecoder("utf-8")(self._pieces.errors)
        self._window: list[str] = []  # the last pieces with text: what follows may depend on them
        self._window_text = ""
        self._stop = tuple(stop)
        self._held = ""
        self.is_stopped = False

    def push(self, token: int) -> str:
        """The text that is complete with this token; "" after a stop string."""
        piece = self._pieces.piece(token)
        if self.is_stopped or piece is None or token in self._special:
            return ""
        data = self._pieces.bytes_of(piece)
        characters = self._characters.decode(data or b"", final=data is None)
        pieces = self._pieces.of_text(characters)
        return self._before_stop(self._decoded([*pieces, piece] if data is None else pieces))

    def tail(self) -> str:
        """The text held back at the end of a passage, with U+FFFD for an incomplete character. The
        next token pushed begins another passage."""
        if self.is_stopped:
            return ""
        rest = self._pieces.of_text(self._characters.decode(b"", final=True))
        shown = self._before_stop(self._decoded(rest))
        held, self._held = self._held, ""
        self._window, self._window_text = [], ""
        return shown + held

    def _decoded(self, pieces: list[str]) -> str:
        """The text that pieces add to what is decoded."""
        if not pieces:
            return ""
        whole = [*self._window, *pieces]
        text = self._pieces.decode(whole)
        fresh = text[len(commonprefix((self._window_text, text))) :]
        self._window = pieces if fresh else whole
        self._window_text = self._pieces.decode(pieces) if fresh else text
        return fresh

    def _before_stop(self, text: str) -> str:
        """The part of the held text and this one that can be shown."""
        if not self._stop:
            return text
        self._held += text
        stops = [at for at in (self._held.find(text) for text in self._stop) if at >= 0]
        if stops:
            self.is_stopped = True
            shown, self._held = self._held[: min(stops)], ""
            return shown
        cut = len(self._held) - self._held_back()
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def _held_back(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        longest = min(len(self._held), max((len(text) - 1 for text in self._stop), default=0))
        for length in range(longest, 0, -1):
            if any(text.startswith(self._held[-length:]) for text in self._stop):
                return length
        return 0


class TokenTexts:
    """The text of single tokens, cached; a byte that is not a whole character shows as <0xE2>.

    pieces: the vocabulary's. special: the tokens without text in an answer, collected once for a
    model, since 6,000 added tokens take 10 ms.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a fast transformers tokenizer."""
        backend = tokenizer.backend_tokenizer
        added = backend.get_added_tokens_decoder()
        self.tokenizer, self.pieces = tokenizer, _Pieces(backend)
        self.special = frozenset(token for token, one in added.items() if one.special)
        self._texts: dict[int, str] = {}

    def __call__(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._text(token)
        return self._texts[token]

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text, possibly only part of a character."""
        data = self.pieces.bytes_of(self.pieces.piece(token) or "")
        return data or self(token).encode()

    def _text(self, token: int) -> str:
        piece = self.pieces.piece(token) or ""
        data = self.pieces.bytes_of(piece)
        if data:
            characters = data.decode("utf-8", "surrogateescape")
            return "".join(f"<0x{b:02X}>" if (b := _stray(c)) else c for c in characters)
        text = str(self.tokenizer.decode([token]))
        return " " + text.lstrip(" ") if piece.startswith("\u2581") else text


class _Pieces:
    """The pieces of a vocabulary as its decoder takes them, and which of them are bytes."""

    def __init__(self, backend: Any) -> None:
        self.piece: Callable[[int], str | None] = backend.id_to_token
        decoder = backend.decoder
        self.decode: Callable[[list[str]], str] = " ".join if decoder is None else decoder.decode
        self._is_byte_level = self.decode(["a", "\u00c3", "\u00a9", "a"]) == "a\u00e9a"
        self._falls_back = self.decode(["a", "<0xC3>", "<0xA9>", "a"]) == "a\u00e9a"
        # as the decoders do: one U+FFFD for the bytes of an incomplete character, or for each
        self.errors = "replace" if self._is_byte_level else "surrogateescape"

    def bytes_of(self, piece: str) -> bytes | None:
        """The bytes that a piece stands for; None for a piece of text."""
        if self._falls_back and (one := BYTE.fullmatch(piece)):
            return bytes([int(one[1], 16)])
        if self._is_byte_level and all(c in BYTES for c in piece):
            return bytes(BYTES[c] for c in piece)
        return None

    def of_text(self, characters: str) -> list[str]:
        """Pieces that decode to characters that came as bytes."""
        if self._is_byte_level:
            return ["".join(CHARACTERS[b] for b in characters.encode())] if characters else []
        return [
            piece
            for c in characters
            for piece in ([STRAY] if _stray(c) else [f"<0x{b:02X}>" for b in c.encode()])
        ]


def _stray(character: str) -> int:
    """The byte that Python's surrogateescape hides in a character; 0 for any other character."""
    return ord(character) - 0xDC00 if "\udc80" <= character <= "\udcff" else 0


def _byte_table() -> dict[str, int]:
    """Maps the printable character that byte-level BPE writes for a byte to that byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in kept]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


BYTES = _byte_table()
CHARACTERS = {byte: character for character, byte in BYTES.items()}
