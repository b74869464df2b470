"""Stubs of Gradio: it writes them for editors at every import, and we do without."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def no_stubs() -> Iterator[None]:
    """While Gradio is imported here it writes no stubs (.pyi) beside its files. For them it parses
    the source of every component, which is half of its import; a class without a file has none."""
    real = inspect.getfile

    def getfile(object: Any) -> str:
        if str(getattr(object, "__module__", "")).startswith("gradio."):
            raise OSError("no stub is wanted")
        return real(object)

    inspect.getfile = getfile
    try:
        yield
    finally:
        inspect.getfile = real
