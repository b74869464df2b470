"""The progress of `medusa-chat models pull` on stderr."""

import sys
import time
from collections.abc import Iterator

from medusa_chat.cli.progress_line import LINE_SECONDS, note
from medusa_chat.hub import DownloadEvent
from medusa_chat.units import transfer


def shown(events: Iterator[DownloadEvent]) -> Iterator[DownloadEvent]:
    """Pass the events on and show them on stderr: one changing line, or a new line now and then."""
    is_terminal, last, told = sys.stderr.isatty(), time.monotonic(), ""
    for event in events:
        if event.note and event.note != told:
            told = event.note
            print("\r\x1b[K" if is_terminal else "", end="", file=sys.stderr)
            note(told)
        if is_terminal:
            print(f"\r\x1b[K{progress_line(event)}", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - last > LINE_SECONDS:
            last = time.monotonic()
            note(progress_line(event))
        yield event
    if is_terminal:
        print(file=sys.stderr)


def progress_line(event: DownloadEvent) -> str:
    """Bytes, speed, time left and file, for one line of a terminal."""
    parts = transfer(event.done, event.total, event.speed)
    if event.phase in ("check", "wait"):
        parts.append({"check": "checking existing files", "wait": "waiting"}[event.phase])
    return "  ".join([*parts, event.file])[:100]
