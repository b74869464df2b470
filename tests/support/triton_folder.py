"""Where Triton lies for the tests: beside torch it would make other libraries compile with it."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def triton_or_skip(*beside: Path) -> dict[str, str]:
    """The environment of a child process that finds Triton, and modules in the folders `beside`.
    Skips without one, but never in CI."""
    folder = os.environ.get("TRITON_FOLDER", "")
    if not folder and find_spec("triton") is None:
        assert "CI" not in os.environ, "CI has to say where Triton is: TRITON_FOLDER"
        pytest.skip("needs Triton")
    places = os.pathsep.join(
        filter(None, (folder, *map(str, beside), os.environ.get("PYTHONPATH")))
    )
    return os.environ | {"PYTHONPATH": places}
