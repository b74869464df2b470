"""The host and port that the page opens on: what is refused, and the names of the host.

Gradio searches the usual range of ports itself.
"""

import contextlib
import secrets
import socket
from collections.abc import Iterator

from medusa_chat.errors import PortInUseError, UsageError

Auth = tuple[str, str]
USER = "medusa"
NETWORKS = ("local", "lan", "home", "home.arpa", "fritz.box", "localdomain")  # as routers call them
# Hosts that are all interfaces: their family, and an address of nobody's (RFC 5737 and 3849).
EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1"),
    "::": (socket.AF_INET6, "2001:db8::1"),
}


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
    return [name, *(f"{name}.{network}" for network in NETWORKS)]


def login_for(host: str, asked: Auth | None) -> Auth | None:
    """The user and password to ask for: made up where others can reach the host. Raises
    UsageError."""
    if asked is None and not is_local(host):
        return USER, secrets.token_urlsafe(16)
    if asked is not None and not all(asked):
        raise UsageError("--auth needs a user and a password: USER:PASSWORD")
    return asked


def addresses(host: str, port: int | None) -> list[str]:
    """The page's address for other machines of the network, where it listens on all; empty for
    another, or without a network. The system is asked for a way; nothing is sent."""
    if host not in EVERYWHERE:
        return []
    family, documentation = EVERYWHERE[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documentation, 9))
            found: str = probe.getsockname()[0]
            return [f"http://{f'[{found}]' if ':' in found else found}:{port}/"]
    except OSError:
        return []
