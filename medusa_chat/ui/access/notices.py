"""Notices: what an event tells its browser.

Gradio shows that for events that it queues alone, and prints the rest."""

import json
from contextvars import ContextVar
from typing import Literal
from urllib.parse import quote

from gradio import helpers
from gradio.context import LocalContext

HEADER = "x-medusa-notice"  # of the answer to an event: JSON as a part of an address (first.js)
LONGEST = 250  # characters
MOST = 3500  # of the header: proxies take few
USUAL = helpers.log_message
# [level, text, seconds that it stays or None] of the request that is answered.
Told = list[tuple[str, str, float | None]]
NOTICES: ContextVar[Told | None] = ContextVar("notices", default=None)


def carry_notices() -> None:
    """Have gr.Info and gr.Warning reach the browser from every event."""
    vars(helpers)["log_message"] = _tell


def told() -> str:
    """The header's value; empty where there is nothing to tell."""
    notices = list(NOTICES.get() or ())
    while notices and len(value := quote(json.dumps(notices, ensure_ascii=False))) > MOST:
        del notices[-1]
    return value if notices else ""


def _tell(
    message: str,
    title: str,
    level: Literal["info", "warning", "success"] = "info",
    duration: float | None = 10,
    visible: bool = True,
) -> None:
    notices = NOTICES.get()
    if notices is None or LocalContext.event_id.get(None) is not None:
        return USUAL(message, title, level, duration, visible)
    notices.append((level, str(message)[:LONGEST], duration))
