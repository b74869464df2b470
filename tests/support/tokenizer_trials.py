"""Tokenizer trials in this process: one of their own takes a third of a second to start. That it is
one, and its limits, are tested in tests/checkpoints/test_tokenizer_trial.
"""

from pathlib import Path

import pytest

from medusa_chat.checkpoints import load, tokenizer_trial


class TrialHere:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def refuse(self) -> None:
        problem = tokenizer_trial.problem_of(self._folder / tokenizer_trial.FILE)
        tokenizer_trial.refuse_problem(self._folder, problem)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import it; of `inspect` alone, for a load needs none of plain parts."""
    own = tokenizer_trial.TokenizerTrial

    def trial(folder: Path, plain_too: bool = False) -> TrialHere | tokenizer_trial.TokenizerTrial:
        return TrialHere(folder) if plain_too else own(folder)

    monkeypatch.setattr(tokenizer_trial, "_begin", lambda at, seconds: None)
    monkeypatch.setattr(load, "TokenizerTrial", trial)
