"""The runner of assets/benchmarks/gpu.py: what ends one part leaves the others alone."""

import json
from pathlib import Path

import pytest
from support.waiting import wait_for

FOLDER = Path(__file__).parents[2] / "assets" / "benchmarks"
FAULTS = """
import os, signal, time

def works(bench, value=1):
    yield "value", value

def dies(bench, number):
    yield "before", 1
    os.kill(os.getpid(), number)

def fails(bench):
    yield "before", 1
    raise ValueError("of this part")

def hangs(bench, of_child):
    child = os.fork()
    if child:
        with open(of_child, "w") as file:
            file.write(str(child))
        yield "before", 1
    time.sleep(600)

def refuses(bench):
    from medusa_chat.decoding.backends.parity import agrees

    def computes():
        raise RuntimeError("of this kernel")

    yield "agrees", agrees("torch's instead", computes, 1.0)

def leaves(bench):
    yield "before", 1
    raise SystemExit("left out: for a reason")

def meets(bench, mine, other):
    open(mine, "w").close()
    for _ in range(600):
        if os.path.exists(other):
            yield "met", True
            return
        time.sleep(0.05)

def reads(bench, file):
    with open(file) as report:
        yield "written", report.read()
    yield "known", bench.figure("works", "value")
"""


@pytest.fixture
def faults(tmp_path, monkeypatch):
    """A function that runs parts of FAULTS and returns what is in the file afterwards."""
    monkeypatch.syspath_prepend(str(FOLDER))
    (tmp_path / "faults.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    from gpu_runner import Part, run_parts

    def run(*parts, minutes=1.0, beside=0):  # of the first parts so many side by side
        out = tmp_path / "out.json"
        fields = {"device": "cpu", "is_dry": True, "model": None}
        made = [
            Part(name, f"faults:{function}", seconds, options, needs, number >= beside)
            for number, (name, function, seconds, options, *needs) in enumerate(parts)
        ]
        for report in run_parts(made, out, fields, minutes, print):
            assert json.loads(out.read_text()) == report  # written after each part
        return report["parts"]

    return run


def is_over(pid):
    """Whether a process has ended; one that nobody waited for is a zombie."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True


@pytest.mark.parametrize("number", [9, 11], ids=["SIGKILL", "SIGSEGV"])
def test_a_part_that_dies_leaves_what_it_found_and_the_other_parts(faults, number):
    found = faults(("first", "dies", 30, {"number": number}), ("then", "works", 30, {}))
    assert found["first"]["outcome"] == f"killed by {'SIGKILL' if number == 9 else 'SIGSEGV'}"
    assert found["first"]["found"] == {"before": 1}
    assert number == 9 or "in dies" in found["first"]["said"]  # of SIGKILL nobody is told
    assert found["then"]["outcome"] == "done" and found["then"]["found"] == {"value": 1}
    assert found["then"]["seconds"] >= 0


def test_a_part_that_fails_says_why(faults):
    found = faults(("first", "fails", 30, {}), ("then", "works", 30, {"value": 2}))
    assert found["first"]["outcome"] == "failed" and found["first"]["found"] == {"before": 1}
    said = found["first"]["said"]
    assert "ValueError: of this part" in said and "assets/benchmarks/gpu_part.py" in said
    assert str(FOLDER) not in said  # where this machine has it is nobody's business
    assert found["then"]["found"] == {"value": 2}


def test_a_kernel_that_is_refused_shows_where_it_failed(faults):
    found = faults(("first", "refuses", 60, {}))
    assert found["first"]["found"] == {"agrees": False}
    assert "torch's instead: of this kernel" in found["first"]["said"]
    assert "in computes" in found["first"]["said"]


def test_a_part_that_hangs_is_stopped_with_its_children(faults, tmp_path):
    of_child = tmp_path / "pid"
    options = {"of_child": str(of_child)}
    found = faults(("first", "hangs", 4, options), ("then", "works", 30, {}))
    assert found["first"]["outcome"] == "stopped at its time limit of 4 s"
    assert found["first"]["found"] == {"before": 1} and found["then"]["outcome"] == "done"
    assert "in hangs" in found["first"]["said"]
    wait_for(lambda: is_over(of_child.read_text()))


def test_a_part_that_would_begin_too_late_is_told_as_not_run(faults):
    found = faults(("short", "works", 1, {}), ("long", "works", 600, {}), minutes=1.0)
    assert found["short"]["outcome"] == "done"
    assert found["long"] == {"outcome": "not run: time was up"}


def test_a_part_may_say_itself_why_it_is_left_out(faults):
    found = faults(("first", "leaves", 30, {}), ("then", "works", 30, {}, "no_such_package"))
    assert found["first"]["outcome"] == "left out: for a reason"
    assert found["then"]["outcome"] == "left out: no_such_package is not installed"


def test_a_part_knows_what_was_found_before_it(faults, tmp_path):
    out = str(tmp_path / "out.json")
    found = faults(("works", "works", 30, {"value": 3}), ("reads", "reads", 30, {"file": out}))
    assert found["reads"]["found"]["known"] == 3
    assert json.loads(found["reads"]["found"]["written"])["parts"]["works"]["outcome"] == "done"


def test_neighbours_that_are_not_timed_run_side_by_side(faults, tmp_path):
    """And what they found is known to the parts after them."""
    one, two, out = (str(tmp_path / name) for name in ("one", "two", "out.json"))
    both = ({"mine": one, "other": two}, {"mine": two, "other": one})
    parts = [(name, "meets", 60, given) for name, given in zip("ab", both, strict=True)]
    found = faults(*parts, ("reads", "reads", 30, {"file": out}), beside=2)
    assert all(found[name]["found"] == {"met": True} for name in "ab")
    assert set(json.loads(found["reads"]["found"]["written"])["parts"]) == {"a", "b"}
