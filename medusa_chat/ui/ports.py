"""The port that the page opens on, and its login: what is refused, and what is made up.

Gradio searches the usual range of ports itself.
"""

import contextlib
import secrets
from collections.abc import Iterator

from medusa_chat.errors import PortInUseError, UsageError
from medusa_chat.hosts import is_local

Auth = tuple[str, str]
USER = "medusa"


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


def login_for(host: str, asked: Auth | None) -> Auth | None:
    """The user and password to ask for: made up where others can reach the host. Raises
    UsageError."""
    if asked is None and not is_local(host):
        return USER, secrets.token_urlsafe(16)
    if asked is not None and not all(asked):
        raise UsageError("--auth needs a user and a password: USER:PASSWORD")
    return asked
