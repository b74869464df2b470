"""serve(): the API alone, on a port of its own, until Ctrl-C."""

import socket
from collections.abc import Callable
from dataclasses import dataclass

import uvicorn

from medusa_chat.errors import PortInUseError
from medusa_chat.hosts import EVERYWHERE, Hosts, addresses, check_host, own_names
from medusa_chat.runtime.session import Session
from medusa_chat.server.app import Api, ApiOptions, require_key

PORTS = range(8000, 8100)  # where none is asked for
CLOSING_SECONDS = 2  # that answers have to end after Ctrl-C
INTERRUPTED = 130


@dataclass(frozen=True)
class ServeOptions:
    """Where the API is opened, and who may ask. port: None is the first free one."""

    host: str = "127.0.0.1"
    port: int | None = None
    api: ApiOptions = ApiOptions()


def open_api(session: Session, options: ServeOptions) -> Api:
    """The API for a host. Raises UsageError for a host that cannot be, or needs a key."""
    host = options.host.strip("[]")
    check_host(host)
    require_key(host, options.api)
    hosts = Hosts([host, *own_names(host)], allows_addresses=host in EVERYWHERE)
    return Api(session, hosts, options.api)


def serve(session: Session, options: ServeOptions, tell: Callable[[str], None]) -> int:
    """Serve until Ctrl-C; returns the exit code. tell gets the lines the user must see. Raises
    PortInUseError, UsageError."""
    api = open_api(session, options)
    host = options.host.strip("[]")
    with bound_socket(host, options.port) as listening:
        port = listening.getsockname()[1]
        for line in greeting(host, port, options.api.key):
            tell(line)
        config = uvicorn.Config(
            api,
            log_level="warning",
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=CLOSING_SECONDS,
        )
        try:
            uvicorn.Server(config).run(sockets=[listening])
        except KeyboardInterrupt:
            pass
    return INTERRUPTED


def bound_socket(host: str, port: int | None) -> socket.socket:
    """A socket bound to the port, or without one to the first free of PORTS. Raises
    PortInUseError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in [port] if port is not None else PORTS:
        made = socket.socket(family, socket.SOCK_STREAM)
        if hasattr(socket, "SO_EXCLUSIVEADDRUSE"):  # Windows shares a port without it
            made.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((host, number))
            made.listen(128)
            return made
        except OSError:
            made.close()
    if port is None:
        raise PortInUseError(f"ports {PORTS[0]} to {PORTS[-1]} are in use: choose one with --port")
    raise PortInUseError(f"port {port} is in use: choose another with --port, or omit it")


def greeting(host: str, port: int, key: str) -> list[str]:
    """What to tell other programs."""
    name = f"[{host}]" if ":" in host else host
    name = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}.get(name, name)
    lines = [f"OpenAI-compatible API at http://{name}:{port}/v1 (Ctrl-C ends it)"]
    lines += [f"for other machines: {url}v1" for url in addresses(host, port)]
    lines.append("API key: yours" if key else "API key: any, none is checked")
    return lines
