"""Parity: whether a kernel of ours runs on a device and agrees with its reference."""

import logging
from collections.abc import Callable
from typing import Any

import torch

Timer = Callable[[Callable[[], Any]], float]  # a function to call -> seconds of one call


def agrees(instead: str, difference: Callable[[], float], tolerance: float) -> bool:
    """Whether the kernel differs from its reference by less than `tolerance`. Where it does not, or
    cannot run, a warning is logged that says what is used `instead`. An error after which the
    device cannot be used is raised."""
    try:
        worst = difference()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # no Triton, no compiler, an architecture it does not know
        logging.getLogger(__name__).warning("%s: %s", instead, error)
        return False
    if not worst < tolerance:
        logging.getLogger(__name__).warning("%s: our kernel is off by %.2g", instead, worst)
        return False
    return True
