"""Which spans of an answer are reasoning: the text between <think> and </think>."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Span:
    """text[start:end] without its tags. is_open: reasoning whose closing tag has not come yet."""

    start: int
    end: int
    is_reasoning: bool
    is_open: bool = False


def spans(text: str) -> list[Span]:
    """The spans in order, tags left out. A text that begins inside reasoning (its opening tag
    was part of the prompt) is known by a closing tag that comes first."""
    found, at = [], 0
    close, opening = text.find(CLOSE), text.find(OPEN)
    if close >= 0 and not 0 <= opening < close:
        found.append(Span(0, close, True))
        at = close + len(CLOSE)
    while (opening := text.find(OPEN, at)) >= 0:
        found.append(Span(at, opening, False))
        start = opening + len(OPEN)
        close = text.find(CLOSE, start)
        end = len(text) if close < 0 else close
        found.append(Span(start, end, True, close < 0))
        at = len(text) if close < 0 else close + len(CLOSE)
    found.append(Span(at, len(text), False))
    return [span for span in found if text[span.start : span.end].strip() or span.is_open]


def visible_text(text: str) -> str:
    """The text without reasoning, while it comes; half a tag at its end is held back."""
    shown = "".join(text[span.start : span.end] for span in spans(text) if not span.is_reasoning)
    for length in range(len(CLOSE) - 1, 0, -1):
        if shown.endswith((OPEN[:length], CLOSE[:length])):
            return shown[:-length]
    return shown


def pieces_within(pieces: Iterable[tuple[str, int]], span: Span) -> Iterator[tuple[str, int]]:
    """The part of the pieces, one after the other a text, that lies in the span."""
    at = 0
    for text, tokens in pieces:
        cut = text[max(0, span.start - at) : max(0, span.end - at)]
        if cut:
            yield cut, tokens
        at += len(text)
