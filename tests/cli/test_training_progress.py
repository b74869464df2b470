"""The progress of a training: what its lines say."""

import pytest

from medusa_chat.cli import training_progress
from medusa_chat.cli.training_progress import LINE_SECONDS, RECENT, TrainingView
from medusa_chat.training.distill_conversations import Answered
from medusa_chat.training.events import Stage


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(training_progress.time, "monotonic", lambda: now[0])
    return now


def last_line(capsys):
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_answers_are_counted_with_their_speed_and_the_time_left(clock, capsys):
    view = TrainingView(as_json=False)
    view.show(Stage("answering 40 questions"))
    for done in range(1, 11):
        clock[0] += 2 * LINE_SECONDS
        view.show(Answered(done, 40, 1000 * done))
    assert "answer 10/40  10,000 tokens  50 tokens/s  10 min left" in last_line(capsys)


def test_answers_of_an_earlier_run_do_not_make_it_faster(clock, capsys):
    view = TrainingView(as_json=False)
    view.show(Stage("answering 1,000 questions"))
    for done in range(1, 501):  # read from a file, at once
        view.show(Answered(done, 1000, 100 * done))
    for done in range(501, 501 + RECENT):
        clock[0] += 2 * LINE_SECONDS
        view.show(Answered(done, 1000, 100 * done))
    clock[0] += 2 * LINE_SECONDS
    view.show(Answered(501 + RECENT, 1000, 100 * (501 + RECENT)))
    assert "  5 tokens/s  " in last_line(capsys)
