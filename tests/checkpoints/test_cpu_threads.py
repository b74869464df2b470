"""Threads: as many as a step's work is worth, and one less beside a page."""

import pytest
import torch
from torch import nn

from medusa_chat.checkpoints import devices
from medusa_chat.units import gb


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    """A process that began with eight threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(devices, "_most_threads", 8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("mebibytes", "expected"), [(1, 1), (40, 1), (80, 2), (4000, 8)])
def test_a_model_gets_threads_for_what_a_step_reads(mebibytes, expected):
    module = nn.Module()
    numbers = torch.zeros(1).expand(2**18 * mebibytes)  # all of them in one place
    module.register_parameter("weight", nn.Parameter(numbers, requires_grad=False))
    assert (
        devices.settle_threads(module)
        == f"{expected} of 8 CPU threads; a step reads {gb(mebibytes * 2**20)}"
    )
    assert torch.get_num_threads() == expected


def test_one_is_left_to_whoever_shows_the_answer():
    devices.leave_one_core()
    assert devices.most_threads() == 7


def test_the_last_one_stays(monkeypatch):
    monkeypatch.setattr(devices, "_most_threads", 1)
    devices.leave_one_core()
    assert devices.most_threads() == 1
