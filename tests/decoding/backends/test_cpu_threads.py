"""Threads: as many as a step's work is worth, and one less beside a page."""

import pytest
import torch
from torch import nn

from medusa_chat.decoding.backends import cpu_threads
from medusa_chat.units import gb


@pytest.fixture(autouse=True)
def eight(monkeypatch):
    """A process that began with eight threads."""
    before = torch.get_num_threads()
    monkeypatch.setattr(cpu_threads, "_most", 8)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("mebibytes", "expected"), [(1, 1), (40, 1), (80, 2), (4000, 8)])
def test_a_model_gets_threads_for_what_a_step_reads(mebibytes, expected):
    with torch.device("meta"):
        module = nn.Linear(2**18, mebibytes, bias=False)
    assert (
        cpu_threads.settle(module)
        == f"{expected} of 8 CPU threads; a step reads {gb(mebibytes * 2**20)}"
    )
    assert torch.get_num_threads() == expected


def test_one_is_left_to_whoever_shows_the_answer():
    cpu_threads.leave_one()
    assert cpu_threads.most() == 7


def test_the_last_one_stays(monkeypatch):
    monkeypatch.setattr(cpu_threads, "_most", 1)
    cpu_threads.leave_one()
    assert cpu_threads.most() == 1
