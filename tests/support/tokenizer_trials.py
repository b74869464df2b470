"""Tokenizer trials in this process: one of their own takes a third of a second to start. That it is
one, and its limits, are tested in tests/checkpoints/test_tokenizer_trial.
"""

from pathlib import Path

import pytest

from medusa_chat.checkpoints import load, tokenizer_trial


class TrialHere:
    def __init__(self, folder: Path, plain_too: bool = False) -> None:
        self._folder, file = folder, folder / tokenizer_trial.FILE
        self._file = (
            file if plain_too or (file.is_file() and tokenizer_trial.is_suspect(file)) else None
        )

    def refuse(self) -> None:
        if self._file is not None:
            tokenizer_trial.refuse_problem(self._folder, tokenizer_trial.problem_of(self._file))

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """For modules that import it."""
    monkeypatch.setattr(tokenizer_trial, "_begin", lambda at, seconds: None)
    monkeypatch.setattr(load, "TokenizerTrial", TrialHere)
