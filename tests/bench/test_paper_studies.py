"""The paper's studies, scripts of the repository, run on a small checkpoint with heads."""

import importlib
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from medusa_chat.cli.bench import MOVED
from medusa_chat.cli.main import main

SCRIPTS = Path(__file__).parents[2] / "assets" / "benchmarks" / "paper"


@pytest.fixture
def imported(monkeypatch):
    """Imports a module of the studies; they are gone again after the test."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if (SCRIPTS / f"{name}.py").exists():
            del sys.modules[name]


def test_every_study_gives_rows_that_name_its_script(
    imported, request_of, tmp_path, monkeypatch, capsys
):
    questions, answers = tmp_path / "questions.jsonl", tmp_path / "out.answers.jsonl"
    asked = [{"category": kind, "turns": ["hello", "again"]} for kind in ("writing", "maths")]
    questions.write_text("\n".join(map(json.dumps, asked)), "utf-8")
    draw = random.Random(0)
    said = ["".join(draw.choices("abcdefghijkl", k=16)) for _ in range(12)]
    kept = [
        {"messages": [{"role": "user", "content": s[:8]}, {"role": "assistant", "content": s}]}
        for s in said
    ]
    answers.write_text("\n".join(map(json.dumps, kept)), "utf-8")
    given = ["--checkpoint", request_of.checkpoint, "--precision", "fp32", "--device", "cpu"]
    given += ["--prompts", str(questions), "--data", str(answers), "--json"]
    given += ["--draft", request_of.checkpoint, "--max-new-tokens", "14", "--rounds", "1"]
    kept_by_report = ["--report", str(tmp_path / "r.html"), "--answers", str(tmp_path / "a.jsonl")]
    given += ["--picture", str(tmp_path / "p.svg"), "--nodes", "8"]
    for module, small in (
        ("figures", {"SIZES": (8,), "DENSE_EACH": 1}),
        ("head_shapes", {"SEEDS": (0,)}),
        ("kept_stages", {"STEPS": 4}),
    ):
        for name, value in small.items():
            monkeypatch.setattr(imported(module), name, value)
    shapes = imported("head_shapes")
    monkeypatch.setattr(shapes, "ALONE", replace(shapes.ALONE, max_steps=2, batch_tokens=64))
    script = imported("run")
    for name in script.STUDIES:
        script.main([name, *given, *(kept_by_report if name == "report" else [])])
        rows = json.loads(capsys.readouterr().out)["rows"]
        measured = any(row["value"] is not None for row in rows)
        assert measured or name == "reference", (name, rows)
        assert all(f"paper/run.py {name}" in row["command"] for row in rows), name
    assert "</html>" in (tmp_path / "r.html").read_text("utf-8")
    assert "</svg>" in (tmp_path / "p.svg").read_text("utf-8")
    with pytest.raises(SystemExit, match="--report is for the study report"):
        script.main(["trees", *given, *kept_by_report])  # it wrote a page without answers


def test_a_study_that_moved_is_named_with_its_script(imported, capsys):
    assert set(imported("run").STUDIES) == MOVED
    assert main(["bench", "--study", "ladder"]) == 2
    assert "python assets/benchmarks/paper/run.py ladder" in capsys.readouterr().err


def test_the_papers_intensities_are_the_models(imported):
    rows = {row["name"]: row for row in imported("figures").hardware(None)}
    assert rows["33B linear, batch 1, q 1"]["value"] == pytest.approx(1.0, abs=0.01)
    assert "MODEL" in rows["7B on H200"]["note"]
