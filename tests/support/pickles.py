"""Conversion of pickled weights in this process: its own one takes three seconds of a processor to
import torch. That it is one, and its limits, are tested in tests/checkpoints/test_pickle_sandbox.
"""

import json
from collections.abc import Sequence

import pytest

from medusa_chat.checkpoints import pickle_sandbox, pickle_sandbox_child


def _here(jobs: Sequence[pickle_sandbox.Job]) -> tuple[list[str | None], str]:
    answers = [pickle_sandbox_child.problem_of(json.loads(job.line())) for job in jobs]
    return answers, "ended with code 0"


@pytest.fixture(autouse=True)
def pickles_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import it."""
    monkeypatch.setattr(pickle_sandbox, "_run_child", _here)
