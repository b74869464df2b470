"""Kernels in Triton, and the C library's source."""

from collections.abc import Callable
from importlib import import_module
from typing import Any


def kernel(file: str, name: str) -> Callable[..., Any]:
    """The function of a file of this folder. Raises ImportError without Triton."""
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{file}"), name)
    return found
