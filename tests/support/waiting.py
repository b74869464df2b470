"""Waiting until a condition holds."""

import time


def wait_for(what, seconds=240):
    """The first true value of what(). seconds: only turns a hang into a failure."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)
    return found
