"""The study "drafters": every drafter on the same questions. No figure of this file is a
measurement."""

from dataclasses import replace

from support.checkpoints import write_checkpoint

from medusa_chat.bench.answers import Question, Run
from medusa_chat.bench.drafters import OURS, PLAIN, ours, rows_of
from medusa_chat.decoding.drafters import kinds
from medusa_chat.messages import LoadRequest
from medusa_chat.paths import asset

ASKED = [Question([1, 2, 3], ""), Question([4, 5], "")]


def test_our_drafters_are_timed_alone(study):
    rows = list(study("drafters", questions=2).values())
    beside = [n for n, d in OURS.items() if kinds.BY_NAME.get(d, kinds.NONE).has_own_tree]
    assert [row["name"] for row in rows[:4]] == [name for name in OURS if name not in beside]
    same = [row["value"] for row in rows if row["name"].endswith("same tokens")]
    assert same == [1] * 4 and rows[0]["ratio"] == 1


def test_what_drafts_beside_the_model_is_timed_too(study):
    demo = LoadRequest(drafts=(str(asset("demo/draft")),), device="cpu", precision="fp32")
    rows = study("drafters", demo, questions=1)
    assert rows["ours, draft model: same tokens"]["value"] == 1
    assert rows["ours, draft model: tokens a step"]["value"] > 1


def test_each_of_several_numbers_of_nodes_is_timed(context, study):
    rows = study("drafters", questions=1, nodes=(2, 6))
    speeds = [name for name, row in rows.items() if row["unit"] == "tokens/s"]
    functions = ours(replace(context, nodes=(2, 6)))
    assert speeds == list(functions)
    sizes = {name: function.keywords["settings"].nodes for name, function in functions.items()}
    assert sizes[PLAIN] is None
    assert [sizes[f"ours, medusa, {n} nodes"] for n in (2, 6)] == [2, 6]
    same = [row["value"] for name, row in rows.items() if name.endswith("same tokens")]
    assert same == [1] * len(functions)


def test_a_model_without_heads_has_the_drafters_that_need_none(study, tmp_path):
    bare = LoadRequest(str(write_checkpoint(tmp_path, heads=0)), device="cpu", precision="fp32")
    rows = study("drafters", bare, questions=2)
    speeds = [name for name, row in rows.items() if row["unit"] == "tokens/s"]
    assert speeds == ["ours, plain", "ours, prompt lookup", "ours, auto"]


def test_the_fastest_answer_counts_and_only_questions_that_all_answered():
    def made(question, tokens, seconds):
        return Run(question, tokens, len(tokens), float(len(tokens)), seconds)

    found = {
        PLAIN: [made(ASKED[0], (1, 2, 3, 4), 4.0), made(ASKED[1], (1, 2), 1.0)],
        "other": [made(ASKED[0], (1, 2, 9), 1.0), made(ASKED[0], (1, 2, 9), 0.5)],
    }
    rows = {row["name"]: row for row in rows_of(ASKED, found, {"other": "other 1.0"})}
    assert rows[PLAIN]["value"] == 1 and rows["other"]["value"] == 6
    assert rows["other"]["ratio"] == 6 and rows["other"]["note"].startswith("other 1.0; ")
    assert rows["other: same tokens"]["value"] == 0.5
