"""The study "exactness" finds what differs, and says where and by how much."""

from dataclasses import replace

import pytest

from medusa_chat.bench import exactness
from medusa_chat.bench.answers import questions, spread
from medusa_chat.bench.exactness import (
    DRAFTERS,
    MODES,
    answers,
    differences,
    differences_from,
    long_questions,
    scores,
)
from medusa_chat.bench.hf_baseline import matching_baseline


@pytest.fixture
def context(context):
    return replace(context, max_new_tokens=12, questions=2)


def test_a_precision_that_is_asked_for_is_the_only_one(study, request_of, monkeypatch):
    monkeypatch.setattr(exactness, "LONG", 60)
    named = study("exactness", replace(request_of, precision="bf16"), questions=1)
    assert named and all(name.startswith("bf16, ") for name in named)


def test_both_precisions_and_long_prompts_are_the_same(study, request_of, monkeypatch):
    monkeypatch.setattr(exactness, "LONG", 60)
    named = study("exactness", replace(request_of, precision="auto"), questions=1)
    assert {
        f"{p}, {mode}: {d}" for p in ("fp32", "bf16") for mode in MODES for d in DRAFTERS
    } < set(named)
    assert "fp32, greedy, 60 tokens of prompt: transformers" in named
    assert "bf16, greedy: transformers" not in named
    for name, row in named.items():
        assert (row["value"], row["unit"]) == (1, "of 1"), (name, row["note"])


@pytest.mark.parametrize("mode", MODES)
def test_a_difference_is_told_with_its_place_and_gap(context, mode):
    settings = MODES[mode]
    plain = answers(context, questions(context), settings)["none"]
    assert differences(context, plain, plain, settings) == []
    first = plain[0]
    other = first.tokens[5] ^ 1
    changed = replace(first, tokens=(*first.tokens[:5], other, *first.tokens[6:]))
    ended = replace(plain[1], tokens=plain[1].tokens[:-1])
    found = differences(context, plain, [changed, ended], settings)
    assert [(one.question, one.token) for one in found] == [(0, 5), (1, len(ended.tokens))]
    values = scores(context, [*first.question.ids, *first.tokens[:5]], settings)
    assert int(values.argmax()) == first.tokens[5]
    assert found[0].gap == pytest.approx(float(values.max() - values[other])) and found[0].gap > 0
    assert found[1].gap is None


def test_transformers_say_where_a_token_is_not_theirs(context):
    baseline = matching_baseline(context)
    (plain, other) = answers(context, questions(context), MODES["greedy"])["none"]
    assert differences_from(baseline, [plain, other]) == []
    changed = replace(other, tokens=(*other.tokens[:3], other.tokens[3] ^ 1))
    (found,) = differences_from(baseline, [plain, changed])[:1]
    assert (found.question, found.token) == (1, 3) and found.gap > 0
    cut = replace(plain, tokens=plain.tokens[:4])  # as if it had ended there
    assert differences_from(baseline, [cut])[0].token == 4


def test_long_prompts_differ_and_are_as_long_as_asked(context, monkeypatch):
    monkeypatch.setattr(exactness, "LONG", 100)
    found = long_questions(context)
    assert len(found) == 2 and found[0].ids != found[1].ids
    assert all(100 <= len(question.ids) < 200 for question in found)


@pytest.mark.parametrize(
    ("count", "kept"), [(None, [0, 1, 2, 3, 4]), (9, [0, 1, 2, 3, 4]), (2, [0, 2]), (1, [0])]
)
def test_some_of_many_questions_are_spread_evenly(count, kept):
    assert spread(range(5), count) == kept
