"""A small checkpoint for the studies."""

import pytest
from support.checkpoints import write_checkpoint

from medusa_chat.messages import LoadRequest


@pytest.fixture(scope="session")
def request_of(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("studies") / "model", heads=5)
    return LoadRequest(str(folder), device="cpu", precision="fp32")
