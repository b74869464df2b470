"""The progress of `medusa-chat models pull` on stderr."""

import sys
from collections.abc import Iterator

from medusa_chat.cli.progress_line import ProgressLine, note
from medusa_chat.hub import DownloadEvent
from medusa_chat.units import transfer


def shown(events: Iterator[DownloadEvent]) -> Iterator[DownloadEvent]:
    """Pass the events on and show them on stderr: one changing line, or a new line now and then."""
    line, told = ProgressLine(), ""
    for event in events:
        if event.note and event.note != told:
            told = event.note
            line.clear()
            note(told)
        line.tell(progress_line(event))
        yield event
    if sys.stderr.isatty():
        print(file=sys.stderr)


def progress_line(event: DownloadEvent) -> str:
    """Bytes, speed, time left and file, for one line of a terminal."""
    parts = transfer(event.done, event.total, event.speed)
    if event.phase in ("check", "wait"):
        parts.append({"check": "checking existing files", "wait": "waiting"}[event.phase])
    return "  ".join([*parts, event.file])[:100]
