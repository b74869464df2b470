"""How a shared link ends: by itself, by the next one, and not by one that came before it."""

import threading

import pytest

from medusa_chat.ui.access.share import Share
from medusa_chat.ui.access.tunnel import ShareError, Tunnel


@pytest.fixture
def closed():
    """The ports of the tunnels that were closed."""
    return []


@pytest.fixture
def share(closed):
    made = Share(lambda: 7, lambda port: Tunnel("https://a.live", lambda: closed.append(port)))
    yield made
    made.stop()


class Timer:
    """Rings when the test lets it, where it was started and not cancelled."""

    made: list["Timer"]

    def __init__(self, seconds, act, args):
        self.seconds, self.act, self.args, self.is_on = seconds, act, args, False
        self.made.append(self)

    def start(self):
        self.is_on = True

    def cancel(self):
        self.is_on = False

    def ring(self):
        if self.is_on:
            self.act(*self.args)


@pytest.fixture
def timers(monkeypatch):
    Timer.made = []
    monkeypatch.setattr(threading, "Timer", Timer)
    return Timer.made


def test_a_link_ends_by_itself(share, closed, timers):
    share.begin(1).join()
    (timer,) = timers
    assert timer.seconds == 3600 and share.link is not None
    timer.ring()
    assert share.link is None and closed == [7] and share.state.message == "The link has expired."


def test_the_end_of_a_link_before_does_not_end_the_next(share, timers):
    for hours in (1, 8):
        share.begin(hours).join()
    timers[0].ring()
    assert share.link is not None


def test_a_new_link_closes_the_tunnel_of_the_one_before(share, closed):
    for hours in (1, 8):
        share.begin(hours).join()
    assert closed == [7]


def test_an_attempt_that_fails_late_hides_no_link(share):
    begun, late, open_tunnel = threading.Event(), threading.Event(), share._open

    def failing(port):
        begun.set()
        late.wait(240)
        raise ShareError("too late")

    share._open = failing
    first = share.begin(1)
    assert begun.wait(240)
    share._open = open_tunnel
    share.begin(1).join()
    late.set()
    first.join()
    assert share.link is not None and share.state.status == "on"
