"""Parity: whether a kernel of ours runs on a device and agrees with its reference."""

import logging
from collections.abc import Callable, Iterable

import torch

# of our kernels, from their references in fp32
TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 4e-2}


def largest(values: Iterable[float]) -> float:
    """The largest value; NaN if any is."""
    return float(torch.tensor(list(values)).max())


def share(ours: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference of two tensors of one shape and any floating dtypes, as a share of the
    largest number expected; 0 where both are zeros, NaN where any is."""
    difference = float((ours.float() - expected.float()).abs().max())
    return difference / (float(expected.float().abs().max()) or 1.0)


def agrees(instead: str, difference: Callable[[], float], tolerance: float) -> bool:
    """Whether the kernel differs from its reference by less than `tolerance`. If not, or if it
    cannot run, a warning is logged that says what is used `instead`. An error that leaves the
    device unusable is raised."""
    log = logging.getLogger(__name__)
    try:
        worst = difference()
    except torch.AcceleratorError:
        raise
    except Exception as error:  # no Triton, no compiler, an architecture it does not know
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # raises on a lost device, where Triton would blame another
        is_traced = log.isEnabledFor(logging.DEBUG)
        log.warning("%s: %s", instead, error, exc_info=is_traced)
        return False
    if not worst < tolerance:
        log.warning("%s: its output is off by %.2g from PyTorch's", instead, worst)
        return False
    return True
