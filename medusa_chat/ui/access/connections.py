"""Connections: how many a server takes that others can reach.

Uvicorn counts requests and never ends a connection that sends none, or a part of one: 1,100 of them
are all the files that a process may open.
"""

import asyncio
from typing import Any

import uvicorn

MAX_CONNECTIONS = 200  # a browser holds up to six
FILES = 8192  # uvicorn's backlog is 2,048


def bound(config: uvicorn.Config) -> None:
    """Let a server have so many connections and no more, also one that runs: a new one takes the
    place of one with no whole request to answer, and where there is none it is ended."""
    _allow_files()
    if not config.loaded:
        config.load()
    usual: Any = config.http_protocol_class

    class Bounded(usual):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            super().connection_made(transport)
            if len(self.connections) > MAX_CONNECTIONS:
                others = (one for one in self.connections if one is not self)
                next(filter(_is_idle, others), self).transport.abort()

    config.http_protocol_class = Bounded


def _allow_files() -> None:
    """Let the process have a file for each connection that may wait at one moment: asyncio takes
    them all before one can be ended, and logs a traceback for each that it has no file for."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _is_idle(connection: Any) -> bool:
    cycle = getattr(connection, "cycle", None)
    is_asking = cycle is not None and not (cycle.response_complete or cycle.more_body)
    is_read = not connection.flow.write_paused  # else who asked does not take the answer
    return not (is_asking and is_read) and not connection.transport.is_closing()
