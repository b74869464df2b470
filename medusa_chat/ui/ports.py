"""The host and port that the page opens on: what is refused, and the names of the host.

Gradio searches the usual range of ports itself.
"""

import contextlib
import socket
from collections.abc import Iterator

from medusa_chat.errors import PortInUseError, UsageError


@contextlib.contextmanager
def port_errors(port: int | None) -> Iterator[None]:
    """Say in one line that Gradio found no port: the one asked for, or any of its range.

    Raises PortInUseError, and UsageError for what is no port.
    """
    try:
        yield
    except OverflowError as error:
        raise UsageError(f"port is {port}: give 1 to 65535") from error
    except OSError as error:
        if "port" not in str(error):
            raise
        if port is None:
            raise PortInUseError("ports 7860 to 7959 are in use: choose one with --port") from error
        raise PortInUseError(
            f"port {port} is in use: choose another with --port, or omit it"
        ) from error


def check_host(host: str) -> None:
    """Refuse a host that no server can have here: Gradio would try each port for five seconds.

    Raises UsageError.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise UsageError(
            f"host {host!r} is not an address of this machine: give one of its addresses, or "
            "0.0.0.0 for all"
        ) from error


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_names(host: str) -> list[str]:
    """The machine's names by which others may ask for the page."""
    if is_local(host):
        return []
    name = socket.gethostname()
    return [name, f"{name}.local"]
