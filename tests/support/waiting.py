"""Waiting until a condition holds, or a model has answered."""

import time

from medusa_chat.errors import ModelError


def wait_for(what, seconds=240):
    """The first true value of what(). seconds: only turns a hang into a failure."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return found


def ask(session, request):
    """The last value of a request, once it had its turn."""
    ticket = session.submit(request)
    assert ticket.done.wait(240)
    if ticket.result is None:
        raise ModelError(ticket.error)
    return ticket.result
