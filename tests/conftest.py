"""What every test gets: its own data folder, no network, property tests without a clock, a turn."""

import atexit
import gc
import os
import shutil
import tempfile
from collections.abc import Iterator
from ctypes import CDLL
from pathlib import Path

import hypothesis
import pytest

from medusa_chat.checkpoints import native_build
from medusa_chat.paths import DATA_DIR_VARIABLE
from medusa_chat.ui import no_stubs

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # the tests are a CPU's on every machine
# Before anything imports torch: threads that wait for each other without sleeping would take the
# cores from the other test processes, for models that are too small to need them.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# For what is made once for many tests: the user's folder would lend them its tunings.
SHARED_DATA = tempfile.mkdtemp(prefix="medusa-chat-tests-")
atexit.register(shutil.rmtree, SHARED_DATA, ignore_errors=True)
os.environ[DATA_DIR_VARIABLE] = SHARED_DATA

# The C library is compiled once for all tests of a process, not once for each folder.
os.environ.setdefault("MEDUSA_CHAT_NATIVE", str(Path(SHARED_DATA) / "native"))

# A busy machine is no reason to fail, and CI runs the same examples every time.
hypothesis.settings.register_profile("here", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "here")


# Files with few cases that take minutes. `--dist loadfile` hands files out as they are collected
# (`--no-loadscope-reorder`): these first, so that no process is left alone with one at the end.
LONG = (
    "tests/smollm2/",
    "tests/ui/browser/",
    "tests/runtime/test_session.py",
    "tests/cli/test_models_command.py",
    "tests/bench/test_gpu_script.py",
    "tests/decoding/",
    "tests/checkpoints/",
    "tests/training/",
)


def turn(item: pytest.Item) -> int:
    """Which of LONG it lies in; after them all where in none."""
    return next((n for n, name in enumerate(LONG) if item.nodeid.startswith(name)), len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules with tests import Gradio as the page's process does, in half the time. What they
    import lives to the end, so no collection of garbage looks at it again: each load of a model
    collects, and that was half of a small model's."""
    with no_stubs():
        found = yield
    gc.collect()
    gc.freeze()
    return found


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first, the rest as it was."""
    items.sort(key=turn)


@pytest.fixture(autouse=True)
def own_data_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests neither read nor write what the user has."""
    monkeypatch.setenv(DATA_DIR_VARIABLE, str(tmp_path / "medusa-chat-data"))


@pytest.fixture(scope="session")
def library() -> CDLL:
    """The C library of decoding/backends/kernels."""
    found = native_build.library()
    if found is None:
        assert "CI" not in os.environ, "CI has to have a C compiler"
        pytest.skip("needs a C compiler")
    return found
