"""Answer: the events of one job folded into text and rates. No gradio."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from medusa_chat.decoding.events import Event, Finished, Prefilled, Step
from medusa_chat.ui.tree_view import to_line

PLAIN_STEPS = 8  # fewer say nothing about a speed
NOTES = {
    "cancelled": "stopped",
    "length": "stopped: the limit of new tokens is reached",
    "context": "stopped: the context is full",
    "error": "stopped: {message}",
}


@dataclass
class Answer:
    """One answer as far as it has come. live: JSON lines that only ever grow, so that a browser
    gets the new ones alone: a string is more text, an object a status."""

    number: int = 0
    prefilled: Prefilled | None = None
    steps: list[Step] = field(default_factory=list)
    finished: Finished | None = None
    live: str = ""
    tokens: int = 0
    seconds: float = 0.0
    backbone_seconds: float = 0.0
    heads_seconds: float = 0.0
    first_seconds: float | None = None  # from asking to the first token; None: not known
    _text: list[str] = field(default_factory=list)
    _status: str = ""

    def take(self, events: Iterable[Event]) -> None:
        """Fold in what is new in the trace."""
        new: list[str] = []
        for event in events:
            if isinstance(event, Step):
                self.steps.append(event)
                self.tokens += len(event.token_ids)
                self.seconds += event.seconds
                self.backbone_seconds += event.backbone_seconds
                self.heads_seconds += event.heads_seconds
                new.append(event.text)
            elif isinstance(event, Prefilled):
                self.prefilled = event
                new.append(event.text)
            else:
                self.finished = event
                new.append(event.tail)
        if text := "".join(new):
            self._text.append(text)
            self.live += to_line(text) + "\n"

    def say(self, status: str) -> None:
        """Tell what happens while there is no text."""
        if status != self._status:
            self._status = status
            self.live += to_line({"status": status}) + "\n"

    @property
    def text(self) -> str:
        """What was generated so far."""
        return self.finished.text if self.finished else "".join(self._text)

    @property
    def note(self) -> str:
        """Why the answer ended before its end; empty when it did not."""
        if self.finished is None:
            return NOTES["cancelled"]
        return NOTES.get(self.finished.reason, "").format(message=self.finished.message)

    @property
    def model_key(self) -> tuple[str, str, str] | None:
        """What a speed belongs to."""
        first = self.prefilled
        return (first.model, first.precision, first.device) if first else None

    @property
    def is_plain(self) -> bool:
        """Whether this is plain decoding: drafter "none"."""
        return self.prefilled is not None and self.prefilled.settings.get("drafter") == "none"

    @property
    def rate(self) -> float | None:
        """Tokens per second of decoding, prefill left out."""
        if self.finished is not None and self.finished.stats.tokens_per_second:
            return self.finished.stats.tokens_per_second
        return self.tokens / self.seconds if self.seconds > 0 else None

    @property
    def plain_rate(self) -> float | None:
        """The plain speed this answer measured; None when it is no such measurement."""
        ended = self.finished is not None and self.finished.reason != "error"
        return self.rate if ended and self.is_plain and len(self.steps) >= PLAIN_STEPS else None


def shown(messages: Sequence[dict[str, str]], notes: dict[int, str]) -> list[dict[str, Any]]:
    """Messages as gr.Chatbot takes them without changing a character; notes: by position."""
    return [
        {"role": message["role"], "content": _parts(message["content"], notes.get(place, ""))}
        for place, message in enumerate(messages)
    ]


def _parts(text: str, note: str) -> list[dict[str, str]]:
    parts = [{"type": "text", "text": text}] if text or not note else []
    return [*parts, {"type": "text", "text": f"*{note}*"}] if note else parts
