"""TransferState: what a download's thread tells, and how it is stopped."""

import socket
import threading
from dataclasses import dataclass, field
from typing import Any


class Cancelled(Exception):
    """The download was stopped."""


@dataclass
class TransferState:
    """How a download stands: written by its thread, read by others. total, done: bytes to fetch."""

    total: int
    done: int = 0
    phase: str = "connect"
    file: str = ""
    note: str = ""
    stop: threading.Event = field(default_factory=threading.Event)
    response: Any = None

    def check(self) -> None:
        """Raises Cancelled once the download is to stop."""
        if self.stop.is_set():
            raise Cancelled

    def abort(self) -> None:
        """Ask the thread to end, and wake it from a read that waits for the server."""
        self.stop.set()
        response = self.response
        if response is None:
            return
        try:
            stream = response.extensions["network_stream"]
            stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
        except (OSError, KeyError, AttributeError, ValueError):
            pass  # closed already; else its timeout ends the thread
