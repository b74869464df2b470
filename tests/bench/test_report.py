"""The report: what a page and a judge get. No figure of this file is a measurement."""

import json
import re
from dataclasses import replace

import pytest

from medusa_chat import paths
from medusa_chat.bench import FINDINGS as STUDIES_OF_THE_PAPER
from medusa_chat.bench import STUDIES, Report, model_answers, report_html, run
from medusa_chat.bench.html_report import POLICY
from medusa_chat.bench.studies.report import BASES, GENERATE, MEDUSA, PLAIN, by_category, figures
from medusa_chat.cli.bench import FINDINGS, MEASURED
from medusa_chat.cli.main import main

EVIL = '<script>alert("hi")</script> & <img src=x onerror=alert(1)>'
ROWS = [
    {"question_id": 81, "category": "writing", "turns": [EVIL, "again"], "reference": ["x"]},
    {"question_id": 82, "category": "maths", "turns": ["2 + 2"]},
    {"question_id": 83, "category": "writing", "turns": ["a" * 400, "never asked"]},
]


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    found = tmp_path_factory.mktemp("questions") / "question.jsonl"
    found.write_text("\n".join(map(json.dumps, ROWS)) + "\n", "utf-8")
    return found


@pytest.fixture(scope="module")
def told(request_of, file):
    """(what run gave, what the study kept)"""
    report = Report()
    result = run(
        request_of,
        rounds=1,
        max_new_tokens=12,
        tree="auto",
        progress=lambda message: None,
        studies=["report"],
        prompts=file,
        report=report,
    )
    return result, report


def test_speedup_is_acceleration_over_overhead_for_every_kind_and_baseline(told):
    result, report = told
    rows = {row["name"]: row for row in result["rows"]}
    for kind in ("writing", "maths", "all"):
        rate = rows[f"{kind}: acceleration rate"]["value"]
        assert 1 <= rate <= 6
        for base, label in ((PLAIN, ""), (GENERATE, f" against {GENERATE}")):
            overhead, speedup = (rows[f"{kind}: {n}{label}"] for n in ("overhead", "speedup"))
            assert speedup["value"] == pytest.approx(rate / overhead["value"], rel=1e-9)
            assert speedup["against"] == f"{base}, fp32"
    for row in result["rows"]:
        assert row["min"] <= row["value"] <= row["max"]
    assert result["machine"]["prompts"] == 3


def test_a_plain_step_of_every_baseline_gives_one_token(told):
    for one in told[1].answered:
        for turn in one.turns:
            for base in set(BASES) & set(turn.runs):
                assert turn.runs[base].stepped == turn.runs[base].steps


def test_every_way_answers_alike_from_the_same_conversation(told):
    first, second = told[1].answered[0].turns
    assert set(first.runs) == set(second.runs) == {MEDUSA, *BASES}
    for turn in (first, second):
        assert len({run.tokens for run in turn.runs.values()}) == 1
        assert len({tuple(run.question.ids) for run in turn.runs.values()}) == 1
    asked, later = (turn.runs[MEDUSA].question.ids for turn in (first, second))
    assert later[: len(asked)] == asked  # the first turn and its answer come before the second
    assert len(later) > len(asked) + len("u:again\na:")


def test_turns_without_room_are_left_out_and_said_to_be(told):
    result, report = told
    assert [turn.answer for turn in report.answered[2].turns] == [None, None]
    assert "2 turns had no room in the context" in report_html(result, report)
    assert figures(report.answered[2:], PLAIN) is None


def test_the_page_holds_no_script_and_asks_for_nothing(told):
    result, report = told
    text = report_html(result, report)
    assert "&lt;script&gt;alert(&quot;hi&quot;)&lt;/script&gt; &amp; &lt;img" in text
    assert not re.search(r"<(script|img|link|iframe|object|form)|\bsrc=[\"']|url\(|@import", text)
    assert not re.search(r"https?://", text)
    assert POLICY in text and "prefers-color-scheme: dark" in text
    assert "plain decoding, fp32" in text


def test_an_answer_with_markup_is_escaped(told):
    result, report = told
    one = report.answered[0]
    turns = tuple(replace(turn, answer=EVIL) for turn in one.turns)
    evil = Report("<b>f</b>", report.settings, [replace(one, turns=turns, category="<i>")])
    text = report_html(result, evil)
    assert text.count("&lt;script&gt;") >= 4
    assert not re.search(r"<(script|img|b|i)>", text)


def test_answers_are_what_a_judge_reads(told):
    rows = [json.loads(line) for line in model_answers(told[1], "demo-medusa").splitlines()]
    assert [row["question_id"] for row in rows] == [81, 82, 83]
    assert len({row["answer_id"] for row in rows}) == 3
    for row, asked in zip(rows, ROWS, strict=True):
        assert set(row) == {"question_id", "answer_id", "model_id", "choices", "tstamp"}
        assert row["model_id"] == "demo-medusa" and row["tstamp"] > 1e9
        (choice,) = row["choices"]
        assert choice["index"] == 0 and len(choice["turns"]) == len(asked["turns"])
        assert all(isinstance(text, str) for text in choice["turns"])


def test_kinds_stand_in_the_order_of_the_file_and_the_whole_last(told):
    assert list(by_category(told[1].answered)) == ["writing", "maths", "all"]


def test_the_command_writes_the_page_and_the_answers(request_of, file, tmp_path, capsys):
    files = {"--report": tmp_path / "r.html", "--answers": tmp_path / "a.jsonl"}
    given = [str(part) for pair in files.items() for part in pair]
    options = [
        "--checkpoint",
        request_of.checkpoint,
        "--precision",
        "fp32",
        "--max-new-tokens",
        "4",
    ]
    asked = ["bench", "--study", "report", "--prompts", str(file), "--json", *given, *options]
    asked += ["--acceptance", "typical", "--temperature", "0.7", "--model-id", "tiny"]
    asked += ["--max-new-tokens", "4"]
    assert main(asked) == 0
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 15
    text = files["--report"].read_text("utf-8")
    assert text.endswith("</html>\n") and "typical acceptance at temperature 0.7" in text
    assert '"model_id": "tiny"' in files["--answers"].read_text("utf-8")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--report", "r.html"], "are for --study report"),
        (["--temperature", "0.5"], "are for --study report"),
        (["--study", "report", "--temperature", "3"], "temperature"),
        (["--study", "report", "--acceptance", "hopeful"], "acceptance"),
        (["--study", "report", "--report", "no/such/folder/r.html"], "folder"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(options, said, capsys, tmp_path):
    assert main(["bench", "--checkpoint", str(tmp_path / "nothing"), *options]) == 2
    assert said in capsys.readouterr().err


def test_the_help_names_every_study():
    assert MEASURED == ", ".join(STUDIES)
    assert FINDINGS.endswith(", ".join(STUDIES_OF_THE_PAPER))


def test_our_own_questions_are_rows_of_mt_bench():
    lines = paths.asset("benchmarks", "questions.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["question_id"] for row in rows] == list(range(1, len(rows) + 1))
    assert all(1 <= len(row["turns"]) <= 2 and row["category"] for row in rows)
