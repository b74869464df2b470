"""Both ends of the public link: Gradio's tunnel outside, a port for guests inside."""

import asyncio
import contextlib
import hashlib
import secrets
import socket
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp

from medusa_chat.errors import MedusaChatError
from medusa_chat.paths import cache_dir
from medusa_chat.ui.access.guard import MAX_CONNECTIONS, bound

TUNNEL_SERVERS = "https://api.gradio.app/v3/tunnel-request"
SECONDS_TO_ANSWER = 4.0
NO_INTERNET = "No internet: the link could not be made. Chatting here goes on as before."
REFUSED = "The tunnel service did not give a link. Try again in a minute."


class ShareError(MedusaChatError):
    """A link that could not be made."""


@dataclass(frozen=True)
class Tunnel:
    """A public address that leads to a port of this machine. close: ends it, once."""

    url: str
    close: Callable[[], None]


def open_tunnel(port: int) -> Tunnel:
    """Open Gradio's share tunnel to a local port. Raises ShareError, a sentence for the user."""
    import httpx
    from gradio import tunneling

    try:
        answer = httpx.get(TUNNEL_SERVERS, timeout=SECONDS_TO_ANSWER)
        server = answer.raise_for_status().json()[0]
        host, remote_port, authority = server["host"], int(server["port"]), server["root_ca"]
        tunneling.Tunnel.download_binary()
    except httpx.TransportError as error:
        raise ShareError(NO_INTERNET) from error
    except Exception as error:  # whatever a server that is not ours may answer
        raise ShareError(REFUSED) from error
    _refuse_another_program(
        Path(tunneling.BINARY_PATH), tunneling.CHECKSUMS.get(tunneling.BINARY_URL)
    )
    certificate = cache_dir() / "share" / "certificate.pem"
    certificate.parent.mkdir(parents=True, exist_ok=True)
    certificate.write_text(authority)
    name = secrets.token_urlsafe(32)
    tunnel = tunneling.Tunnel(host, remote_port, "127.0.0.1", port, name, str(certificate))
    try:
        return Tunnel(tunnel.start_tunnel(), lambda: _end(tunnel))
    except Exception as error:
        _end(tunnel)
        raise ShareError(REFUSED) from error


def _refuse_another_program(binary: Path, checksum: str | None) -> None:
    """Gradio checks the tunnel program when it downloads it; we do before every start."""
    if hashlib.sha256(binary.read_bytes()).hexdigest() != checksum:
        binary.unlink()
        raise ShareError("The tunnel program was not Gradio's, so it was deleted. Try again.")


def _end(tunnel: object) -> None:
    process = getattr(tunnel, "proc", None)
    if process is not None:
        tunnel.proc = None  # type: ignore[attr-defined]  # Gradio's own kill would print
        process.terminate()
        process.wait(5)


class GuestServer:
    """A local port that only guests come through, on the event loop of the page's own server."""

    def __init__(self) -> None:
        self._app: ASGIApp | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._serving: Future[None] | None = None
        self._port = 0

    def attach(self, app: ASGIApp) -> None:
        """Take the app that guests get; called on the loop that serves the page."""
        self._app, self._loop = app, asyncio.get_running_loop()

    def open(self) -> int:
        """Listen, if nobody did so far; returns the port."""
        if self._loop is None or self._app is None:
            raise ShareError("The page is not open yet. Try again in a second.")
        if self._server is None:
            inside = socket.socket()
            inside.bind(("127.0.0.1", 0))
            self._port = inside.getsockname()[1]
            config = uvicorn.Config(
                self._app,
                lifespan="off",
                log_level="warning",
                proxy_headers=False,
                ws="none",
                backlog=MAX_CONNECTIONS,
            )
            bound(config)
            self._server = uvicorn.Server(config)
            serving = self._server.serve(sockets=[inside])
            self._serving = asyncio.run_coroutine_threadsafe(serving, self._loop)
        return self._port

    def close(self) -> None:
        """Stop listening; returns when the port is closed."""
        if self._server is None or self._serving is None:
            return
        self._server.should_exit = self._server.force_exit = True
        with contextlib.suppress(TimeoutError, asyncio.CancelledError):
            self._serving.result(5)
