"""The line on stderr that says how far something is, and notes beside it."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator

from medusa_chat.clean_stream import clean, exact
from medusa_chat.decoding.events import Event, Reading, Told
from medusa_chat.hub import DownloadEvent
from medusa_chat.messages import LoadPhase
from medusa_chat.units import transfer

LINE_SECONDS = 10.0  # between lines of progress that go to a file


def note(message: str) -> None:
    """One line on stderr."""
    print(f"medusa-chat: {_in_one_line(message)}", file=sys.stderr, flush=True)


def _in_one_line(text: str) -> str:
    """A text without ends of lines: what comes from a file could else pass for a line of ours."""
    return text.replace("\n", " ")


def cleared() -> str:
    """Back to the start of the terminal's line, which is emptied; by spaces on Windows, where not
    every console obeys an escape code."""
    if sys.platform == "win32":
        return f"\r{' ' * (shutil.get_terminal_size().columns - 1)}\r"
    return "\r\x1b[K"


class ProgressLine:
    """How far a load or the reading of a prompt is, on stderr: in a terminal one line that changes
    and is cleared at the end, elsewhere a new line of what may take long now and then, for minutes
    of silence would look like a hang. What takes space on the disk is told before and stays."""

    def __init__(self) -> None:
        self._is_open = False
        self._told = time.monotonic()
        self._note = ""

    def show(self, text: str) -> None:
        """Say `text` instead of what was said before, where stderr is a terminal."""
        if sys.stderr.isatty():
            self._is_open = True
            width = shutil.get_terminal_size().columns - 1  # a second row would stay
            line = clean(_in_one_line(text))[:width]
            print(f"{cleared()}{line}", end="", file=exact(sys.stderr), flush=True)

    def show_bytes(self, phase: LoadPhase) -> None:
        """What is done, told once, then bytes, speed and time left."""
        self.note_once(phase.note)
        self.tell("  ".join([f"{phase.name}ing", *transfer(phase.done, phase.total, phase.rate)]))

    def note_once(self, text: str) -> None:
        """A line that stays, unless it was the last one; nothing for an empty one."""
        if text and text != self._note:
            self.clear()
            self._note = text
            note(text)

    def tell(self, text: str) -> None:
        """As `show`, elsewhere than in a terminal a line of its own now and then."""
        self.show(text)
        if not self._is_open and time.monotonic() - self._told > LINE_SECONDS:
            self._told = time.monotonic()
            note(text)

    def clear(self) -> None:
        """Clear the line that changed."""
        if self._is_open:
            self._is_open = False
            print(cleared(), end="", file=exact(sys.stderr), flush=True)


def pulling(events: Iterable[DownloadEvent]) -> Iterator[DownloadEvent]:
    """The events of a download, which are shown."""
    line = ProgressLine()
    for event in events:
        line.note_once(event.note)
        line.tell(download_line(event))
        yield event
    if sys.stderr.isatty():
        print(file=sys.stderr)


def download_line(event: DownloadEvent) -> str:
    """Bytes, speed, time left and file, for one line of a terminal."""
    parts = transfer(event.done, event.total, event.speed)
    if event.phase in ("check", "wait"):
        parts.append({"check": "checking existing files", "wait": "waiting"}[event.phase])
    return "  ".join([*parts, event.file])[:100]


def with_progress(events: Iterable[Told]) -> Iterator[Event]:
    """The events of an answer but for how much of its prompt is read, which is shown."""
    line = ProgressLine()
    try:
        for event in events:
            if isinstance(event, Reading):
                line.tell(f"reading: {event.tokens:,} of {event.prompt_tokens:,} tokens")
                continue
            line.clear()
            yield event
    finally:
        line.clear()
