"""Faults: what the terminal shows of a call that failed: one short line, whoever made the call."""

import sys
import time
import traceback
from contextlib import suppress
from types import SimpleNamespace

from gradio import routes

from medusa_chat.clean_stream import clean
from medusa_chat.paths import state_dir, write_bytes

FILE = "last-fault.txt"  # in the folder of logs: the traceback of the last line that was shown
SHOWN = 300  # characters
WRITTEN = (1000, 20_000)  # characters of each of its parts, and of all
A_MINUTE = 10  # lines
CUT = "medusa-chat: more calls of the page fail; no more of them are shown for a minute"


def quiet_faults() -> None:
    """Have Gradio print no traceback of a call that failed. It holds what was posted: a guest would
    fill the disk with it, or write on the owner's terminal. The last one stands in FILE, cut."""
    told: list[float] = []
    vars(routes)["traceback"] = SimpleNamespace(print_exc=lambda: _tell(told))


def _tell(told: list[float]) -> None:
    kind, error, trace = sys.exc_info()
    now = time.monotonic()
    told[:] = [at for at in told if at > now - 60]
    if kind is None or len(told) > A_MINUTE:
        return
    told.append(now)
    if len(told) > A_MINUTE:
        print(CUT, file=sys.stderr, flush=True)
        return
    file = state_dir() / FILE
    with suppress(OSError):
        parts = (part[: WRITTEN[0]] for part in traceback.format_exception(error))
        write_bytes(file, clean("".join(parts)[-WRITTEN[1] :]).encode("utf-8", "replace"))
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace else ""
    text = clean(str(error)[:SHOWN]).replace("\n", " ")
    line = f"medusa-chat: a call of the page failed: {kind.__name__}: {text} ({place})"
    print(f"{line}; its traceback is in {file}", file=sys.stderr, flush=True)
