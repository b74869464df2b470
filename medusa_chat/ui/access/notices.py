"""Notices: what an event tells its browser, in a header of its answer.

Gradio's own gr.Info and gr.Warning reach a browser from events that it queues alone.
"""

import json
import warnings
from contextvars import ContextVar
from urllib.parse import quote

HEADER = "x-medusa-notice"  # of the answer to an event: JSON as a part of an address (first.js)
LONGEST = 250  # characters
MOST = 3500  # of the header: proxies take few
SECONDS = 10.0  # that one stays
# [level, text, seconds that it stays or None] of the request that is answered.
Told = list[tuple[str, str, float | None]]
NOTICES: ContextVar[Told | None] = ContextVar("notices", default=None)


def inform(text: str) -> None:
    """Tell the browser whose event is answered; without one nobody hears it."""
    _tell("info", text, SECONDS)


def warn(text: str, seconds: float | None = SECONDS) -> None:
    """As `inform`, of what went wrong; without a browser it is a warning of Python's. seconds: that
    it stays, None until it is clicked."""
    if NOTICES.get() is None:
        warnings.warn(text, stacklevel=2)
    _tell("warning", text, seconds)


def told() -> str:
    """The header's value; empty where there is nothing to tell."""
    notices = list(NOTICES.get() or ())
    while notices and len(value := quote(json.dumps(notices, ensure_ascii=False))) > MOST:
        del notices[-1]
    return value if notices else ""


def _tell(level: str, text: str, seconds: float | None) -> None:
    notices = NOTICES.get()
    if notices is not None:
        notices.append((level, text[:LONGEST], seconds))
