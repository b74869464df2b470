"""Share: the page's public link. Always with a password, never for longer than was asked."""

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from medusa_chat.errors import UsageError
from medusa_chat.ui.access.tunnel import ShareError, Tunnel, open_tunnel

HOURS = (1, 8, 24, 72)
DEFAULT_HOURS = 24
LETTERS = "abcdefghjkmnpqrstuvwxyz23456789"  # nothing that is misread or misheard


@dataclass(frozen=True)
class Link:
    """A link that was made. url: without a slash at its end. expires: Unix time.

    password: what is told to people; key: as good, but for links and QR codes; secret: signs the
    cookies of those who came in.
    """

    url: str
    password: str
    key: str
    secret: bytes
    expires: float

    @property
    def host(self) -> str:
        """The one name guests may come by."""
        return urlsplit(self.url).netloc.lower()

    @property
    def address(self) -> str:
        """The link that needs no password."""
        return f"{self.url}/?key={self.key}"


@dataclass(frozen=True)
class ShareState:
    """The owner's view of the link. message: why there is no link."""

    status: Literal["off", "making", "on"] = "off"
    message: str = ""
    link: Link | None = None


class Share:
    """At most one link at a time; begin and stop return at once.

    enter: opens the port for guests and returns its number. tunnel: makes the public address.
    """

    def __init__(
        self,
        enter: Callable[[], int],
        tunnel: Callable[[int], Tunnel] = open_tunnel,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.state = ShareState()
        self.on_end: list[Callable[[], None]] = []  # called when a link has ended
        self._enter = enter
        self._open = tunnel
        self._clock = clock
        self._lock = threading.Lock()
        self._tunnel: Tunnel | None = None
        self._timer: threading.Timer | None = None
        self._turn = 0  # a link that comes after Stop belongs to an older turn

    @property
    def link(self) -> Link | None:
        """The link as long as it is valid."""
        link = self.state.link
        return link if link is not None and self._clock() < link.expires else None

    def begin(self, hours: int = DEFAULT_HOURS) -> threading.Thread:
        """Make a link that lives for `hours`; the thread ends when there is one, or none."""
        if type(hours) is not int or hours not in HOURS:
            raise UsageError(f"hours is {hours!r:.40}: choose one of {', '.join(map(str, HOURS))}")
        self.stop()
        with self._lock:
            self._turn += 1
            self.state = ShareState("making")
            making = threading.Thread(target=self._make, args=(self._turn, hours), daemon=True)
        making.start()
        return making

    def stop(self, message: str = "") -> None:
        """End the link: every cookie of it is dead at once, the tunnel is closed."""
        with self._lock:
            self._turn += 1
            self.state = ShareState(message=message)
            tunnel, self._tunnel = self._tunnel, None
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        if tunnel is not None:
            tunnel.close()
        for act in self.on_end:
            act()

    def _make(self, turn: int, hours: int) -> None:
        try:
            tunnel = self._open(self._enter())
        except ShareError as error:
            return self._fail(turn, str(error))
        except Exception as error:
            return self._fail(turn, f"The link could not be made: {type(error).__name__}.")
        seconds = hours * 3600.0
        link = Link(
            tunnel.url.rstrip("/"),
            new_password(),
            secrets.token_urlsafe(24),
            secrets.token_bytes(32),
            self._clock() + seconds,
        )
        with self._lock:
            if turn == self._turn:
                self._tunnel, self.state = tunnel, ShareState("on", link=link)
                self._timer = threading.Timer(seconds, self.stop, ["The link has expired."])
                self._timer.daemon = True
                return self._timer.start()
        tunnel.close()

    def _fail(self, turn: int, message: str) -> None:
        with self._lock:
            if turn == self._turn:
                self.state = replace(self.state, status="off", message=message)


def new_password() -> str:
    """Three groups of four letters that can be read out: 59 bits, and guesses are few."""
    return "-".join("".join(secrets.choice(LETTERS) for _ in range(4)) for _ in range(3))


def share_view(state: ShareState) -> dict[str, Any]:
    """The data of the owner's dialog."""
    view: dict[str, Any] = {"status": state.status, "message": state.message, "hours": HOURS}
    if state.link is None:
        return view
    return view | {
        "url": state.link.url,
        "password": state.link.password,
        "address": state.link.address,
        "expires": state.link.expires,
        "qr": qr_of(state.link.address),
    }


def qr_of(text: str) -> str:
    """A QR code as a data address of an SVG picture, dark on white whatever the theme."""
    import segno

    code = segno.make(text, error="m", micro=False)
    return str(code.svg_data_uri(scale=4, border=3, dark="#16211c", light="#ffffff"))
