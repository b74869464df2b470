"""Parity: whether a kernel of ours may be used: it runs on the device, and agrees with its twin."""

import logging
from collections.abc import Callable


def agrees(instead: str, difference: Callable[[], float], tolerance: float) -> bool:
    """Whether the kernel is off from its twin by less than `tolerance`; where it is not, or cannot
    run, that is logged with what is used `instead`."""
    try:
        worst = difference()
    except Exception as error:  # no Triton, no compiler, an architecture it does not know
        logging.getLogger(__name__).warning("%s: %s", instead, error)
        return False
    if not worst < tolerance:
        logging.getLogger(__name__).warning("%s: our kernel is off by %.2g", instead, worst)
        return False
    return True
