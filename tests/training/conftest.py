"""Fixtures of every test of the training."""

import pytest
import torch
from support.hub_files import server  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Models this small are slower on several threads, and much slower on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
