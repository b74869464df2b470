"""The host that a server listens on: its names and addresses, and who can reach it."""

import ipaddress
import socket
from collections.abc import Iterable
from urllib.parse import urlsplit

from medusa_chat.errors import UsageError

LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
NETWORKS = ("local", "lan", "home", "home.arpa", "fritz.box", "localdomain")  # as routers call them
# Hosts that are all interfaces: their family, and an address of nobody's (RFC 5737 and 3849).
EVERYWHERE = {
    "0.0.0.0": (socket.AF_INET, "192.0.2.1"),
    "::": (socket.AF_INET6, "2001:db8::1"),
}


class Hosts:
    """Which names a request's Host header may have, so that no site can rebind its own name.

    names: allowed beside the local ones, without a port.

    allows_addresses: let in every bare IP address, which no page can rebind; for a server that
    listens on all interfaces.
    """

    def __init__(self, names: Iterable[str] = (), *, allows_addresses: bool = False) -> None:
        self.names = {*LOCAL_HOSTS, *(name.lower().strip("[]") for name in names)}
        self.allows_addresses = allows_addresses

    def knows(self, host: str) -> bool:
        """Whether a request may come with this Host header."""
        name = name_of(host)
        return name in self.names or (self.allows_addresses and _is_address(name))


def name_of(host: str) -> str:
    """The name in a Host header or netloc: lower case, without port and brackets."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def is_local(host: str) -> bool:
    """Whether only this machine can reach a server that listens on this host."""
    return host in ("localhost", "::1") or host.startswith("127.")


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


def own_names(host: str) -> list[str]:
    """The machine's names by which others may ask for the page."""
    if is_local(host):
        return []
    name = socket.gethostname()
    return [name, *(f"{name}.{network}" for network in NETWORKS)]


def addresses(host: str, port: int | None) -> list[str]:
    """The page's address for other machines of the network, where it listens on all; empty for
    another, or without a network. The system is asked for a way; nothing is sent."""
    if host not in EVERYWHERE:
        return []
    family, documentation = EVERYWHERE[host]
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((documentation, 9))
            address: str = probe.getsockname()[0]
            return [f"http://{f'[{address}]' if ':' in address else address}:{port}/"]
    except OSError:
        return []


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
