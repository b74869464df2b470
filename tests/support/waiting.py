"""wait_for(): until a condition holds."""

import time


def wait_for(what, seconds=240):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)
