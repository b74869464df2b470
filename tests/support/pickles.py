"""Conversion of pickled weights in this process: its own one takes three seconds of a processor to
import torch. That it is one, and its limits, are tested in tests/checkpoints/test_pickle_sandbox.
"""

import json

import pytest

from medusa_chat.checkpoints import pickle_sandbox


def run_here(job: pickle_sandbox.Job) -> str | None:
    return pickle_sandbox.problem_of(json.loads(json.dumps(job)))


@pytest.fixture(autouse=True)
def pickles_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import it."""
    monkeypatch.setattr(pickle_sandbox, "run", run_here)
