"""A training as the page watches it: its log, what is drawn of it, the wish to stop."""

import json
import os
from types import SimpleNamespace

import pytest
from support.scripted import ScriptedRunner
from support.training_events import step

from medusa_chat.runtime.session import Session
from medusa_chat.training import events
from medusa_chat.training.events import RunLog, latest, read, runs_folder
from medusa_chat.ui.access.guard import GUEST, GUEST_HEADER
from medusa_chat.ui.tune.tab import TuneController
from medusa_chat.ui.tune.training_view import MOST_POINTS, train_view

OWNER = SimpleNamespace(headers={}, username=None)
VISITOR = SimpleNamespace(headers={GUEST_HEADER: "1"}, username=GUEST)


def log_of(count: int, tmp_path, **more) -> RunLog:
    log = RunLog(tmp_path / "secret" / "mine", **more)
    for number in range(1, count + 1):
        log.tell(step(number))
    return log


def test_what_a_training_tells_is_read_back_and_how_it_ended(tmp_path):
    with log_of(3, tmp_path) as log:
        run = latest()
        assert run.is_running and run.first["pid"] == os.getpid() and run.can_stop
        assert [event["step"] for event in run.events] == [1, 2, 3]
        log.stopped()
    run = latest(last_seen=run)
    assert not run.is_running and run.ended["reason"] == "stopped"
    assert latest(last_seen=run) is run, "what has not changed is not read again"


def test_a_failure_is_told_in_one_line(tmp_path):
    with pytest.raises(ValueError), log_of(1, tmp_path):
        raise ValueError("loss is nan\nin row 7")
    view = train_view(latest())
    assert view["text"] == "Failed: loss is nan in row 7." and not view["running"]
    assert train_view(latest(), is_guest=True)["text"] == "Failed."


def test_steps_that_follow_fast_are_left_out(tmp_path, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(events.time, "monotonic", lambda: now[0])
    log = RunLog(tmp_path / "out")
    for number in range(200_000):
        now[0] += 0.25
        if number % 20 == 0 or number < 100:
            log.tell(step(number), is_step=True)
    lines = log.file.read_text().splitlines()
    assert 1000 < len(lines) < 3500
    assert json.loads(lines[2])["step"] == 2


def test_a_line_that_is_half_written_or_damaged_is_left_out(tmp_path):
    log = log_of(2, tmp_path)
    with open(log.file, "a") as file:
        file.write('nonsense\n[1]\n{"event": 3}\n{"event":"step","step":')
    assert len(read(log.file).events) == 2
    log.file.write_text("nonsense\n")
    assert read(log.file) is None and latest() is None


def test_lines_without_what_is_drawn_are_no_steps(tmp_path):
    log = log_of(1, tmp_path)
    for line in ({"event": "step"}, {"event": "step", "step": 1, "steps": 2, "loss": "x"}):
        log.tell(json.dumps(line))
    log.tell('{"event":"step","step":2,"steps":300,"loss":NaN,"top":[[0.1]]}')
    log.tell('{"event":"evaluated","step":2,"top":[[]]}')
    view = train_view(latest())
    assert [at for at, _ in view["loss"]] == [1] and view["held"] == []


def test_curves_keep_the_last_step_and_are_never_too_long(tmp_path):
    view = train_view(read(log_of(299, tmp_path).file))
    assert len(view["loss"]) <= MOST_POINTS and view["loss"][-1][0] == 299
    assert view["loss"][0][1] == pytest.approx(4 - 2 / 300, abs=1e-3), "the mean of the first three"
    assert len(view["top1"]) == 2 and view["lm_loss"] == []
    assert view["part"] == pytest.approx(299 / 300)


def test_a_process_that_is_gone_is_not_waited_for(tmp_path, monkeypatch):
    log = log_of(1, tmp_path)
    monkeypatch.setattr("psutil.pid_exists", lambda pid: False)
    view = train_view(read(log.file))
    assert not view["running"] and "--resume" in view["text"]


def test_the_latest_one_is_the_last_that_began_whatever_the_clock_says(tmp_path, monkeypatch):
    with RunLog(tmp_path / "before") as log:
        log.tell(json.dumps({"event": "stage"}))
    monkeypatch.setattr(events.time, "time_ns", lambda: 1)  # it was set back
    with RunLog(tmp_path / "after") as log:
        log.tell(json.dumps({"event": "stage"}))
    assert latest().output == str(tmp_path / "after")


def test_only_the_last_runs_are_kept(tmp_path):
    for _ in range(14):
        log_of(1, tmp_path)
    assert len(list(runs_folder().glob("*.jsonl"))) == events.MOST_RUNS


def test_a_disk_that_cannot_be_written_does_not_stop_a_training(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(events, "runs_folder", lambda: tmp_path / "file" / "runs")
    with RunLog(tmp_path / "out") as log:
        log.tell(step(1))
        assert not log.wants_stop()


def test_the_owner_may_stop_it_and_a_guest_may_not(tmp_path):
    controller = TuneController(Session(ScriptedRunner()))
    log = log_of(2, tmp_path)
    shown = json.loads(controller.halt(["", ""], VISITOR)[1])
    assert not log.wants_stop() and not shown["stoppable"] and "secret" not in json.dumps(shown)
    shown = json.loads(controller.halt(["", ""], OWNER)[1])
    assert log.wants_stop() and shown["stoppable"]
    log.__exit__(None, None, None)
    assert not log.wants_stop(), "the wish goes with the run"
    alone = log_of(1, tmp_path, can_stop=False)
    assert (
        not json.loads(controller.halt(["", ""], OWNER)[1])["stoppable"] and not alone.wants_stop()
    )


def test_without_a_training_there_is_nothing():
    assert latest() is None and train_view(None) is None


def test_a_training_that_cannot_be_stopped_reads_no_wish(tmp_path):
    log = log_of(1, tmp_path, can_stop=False)
    log.file.with_suffix(".stop").touch()
    assert not log.wants_stop()
