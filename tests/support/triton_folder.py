"""Where Triton and NVRTC lie for the tests: beside torch they would make other libraries compile
with them."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def triton_or_skip(*beside: Path, needs: str = "triton") -> dict[str, str]:
    """The environment of a child process that finds Triton (or `needs`), and modules in the folders
    `beside`. Skips without one, but never in CI."""
    folder = os.environ.get("TRITON_FOLDER", "")
    if not (folder and (Path(folder) / needs).is_dir()) and find_spec(needs) is None:
        assert "CI" not in os.environ, f"CI has to say where {needs} is: TRITON_FOLDER"
        pytest.skip(f"needs {needs}")
    places = os.pathsep.join(
        filter(None, (folder, *map(str, beside), os.environ.get("PYTHONPATH")))
    )
    libraries = {"LD_LIBRARY_PATH": str(Path(folder) / "nvidia" / "cu13" / "lib")} if folder else {}
    return os.environ | libraries | {"PYTHONPATH": places}
