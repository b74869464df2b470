"""The progress of a training: what its lines say."""

import sys
from types import SimpleNamespace

import pytest

from medusa_chat.cli import terminal, training
from medusa_chat.cli.training import LINE_SECONDS, RECENT, TrainingView, calibrated_lines
from medusa_chat.training.distill import Answered
from medusa_chat.training.events import Stage, TrainStep


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test moves: clock[0] is the time in seconds."""
    now = [100.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
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


def test_steps_of_an_earlier_run_do_not_count(clock, capsys):
    view = TrainingView(as_json=False)
    view.show(Stage("heads alone"))
    for step in (501, 502):
        clock[0] += 2 * LINE_SECONDS
        view.show(TrainStep(step, 562, 1.0, (1.0,), ((0.5,),), 1000, 0.1))
    assert "step 502/562  20 min left  50 tokens/s  loss 1.000" in last_line(capsys)


def calibrated(expected, positions):
    named = {"expected": expected, "positions": positions, "measured_on": "rows", "accuracies": []}
    return SimpleNamespace(**named)


@pytest.mark.parametrize(
    ("expected", "positions", "said"),
    [(2.5, 80, "on only 80 positions"), (1.05, 80, "almost nothing"), (2.5, 9000, "")],
)
def test_what_a_calibration_is_worth_is_said(expected, positions, said):
    *_, last = calibrated_lines(calibrated({4: 1.0, 64: expected}, positions))
    assert said in last if said else last.startswith("expected tokens per step")


def test_a_line_that_changes_fits_into_the_terminal(monkeypatch, capsys):
    monkeypatch.setattr(terminal.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    terminal.ProgressLine().show("x" * 200)
    assert capsys.readouterr().err == f"\r\x1b[K{'x' * 39}"
    monkeypatch.setattr(sys, "platform", "win32")  # its consoles may show the escape code
    terminal.ProgressLine().show("x" * 200)
    assert capsys.readouterr().err == f"\r{' ' * 39}\r{'x' * 39}"


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
