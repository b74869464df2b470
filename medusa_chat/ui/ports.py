"""The port the page opens on, and the names of the host it opens on."""

import contextlib
import os
import socket
from collections.abc import Iterator

from medusa_chat.errors import PortInUseError, UsageError

FIRST_PORT, LAST_PORT = 7860, 7959


def choose_port(host: str, port: int | None) -> int:
    """The port to use: the one asked for, or the first free one of the usual range."""
    if port is not None:
        if not _is_free(host, port):
            raise PortInUseError(f"port {port} is in use: choose another with --port, or leave it")
        return port
    for candidate in range(FIRST_PORT, LAST_PORT + 1):
        if _is_free(host, candidate):
            return candidate
    raise PortInUseError(f"ports {FIRST_PORT} to {LAST_PORT} are in use: choose one with --port")


@contextlib.contextmanager
def port_errors(port: int | None) -> Iterator[None]:
    """What Gradio says when another program took the port in between."""
    try:
        yield
    except OSError as error:
        if "port" not in str(error):
            raise
        raise PortInUseError(f"port {port or 'chosen'} was taken: try again") from error


def _is_free(host: str, port: int) -> bool:
    """Whether a server could bind here, and nobody listens on the local address either."""
    for name in {host, "127.0.0.1"}:
        family = socket.AF_INET6 if ":" in name else socket.AF_INET
        with socket.socket(family) as probe:
            if os.name == "posix":  # elsewhere it would let two servers share a port
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((name, port))
            except socket.gaierror:
                raise UsageError(f"host {name!r} is not known: give an address") from None
            except OverflowError:
                raise UsageError(f"port is {port}: give 1 to 65535") from None
            except OSError:
                return False
    return True


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


def own_names(host: str) -> list[str]:
    """The machine's names by which others may ask for the page."""
    if is_local(host):
        return []
    name = socket.gethostname()
    return [name, f"{name}.local"]
