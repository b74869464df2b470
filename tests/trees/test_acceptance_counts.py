"""What is counted in chats, on planted heads whose accuracies are known."""

import json
import random

import pytest
from support.counting import EASY, HARD, PRIOR, TREE, answer, counted, prefilled, record

from medusa_chat.decoding.events import Step
from medusa_chat.trees.acceptance_counts import MOST_STEPS, WEIGHT, AcceptanceCounts, is_counted
from medusa_chat.trees.shapes import cartesian, chain

MEAN = [(a + b) / 2 for a, b in zip(EASY, HARD, strict=True)]


def test_ranks_come_out_as_planted_whatever_was_accepted_above_them():
    """Counting only below accepted nodes would find head 2 far better than it is: what is accepted
    is mostly easy."""
    counts = counted(TREE)
    table = counts.table(PRIOR)
    for head in range(3):
        for rank in range(4):
            if counts.ranks.get((head, rank)):
                assert table[head][rank] == pytest.approx(MEAN[rank], abs=0.03), (head, rank)
    assert abs(MEAN[0] - PRIOR[0][0]) > 0.2, "the stored table alone would not pass"


def test_a_rank_that_was_never_drafted_keeps_its_stored_value():
    counts = counted(cartesian(2, 1), answers=2)
    assert (0, 2) not in counts.ranks and (2, 0) not in counts.ranks
    table = counts.table(PRIOR)
    assert table[0][2:] == list(PRIOR[0][2:]) and table[2] == list(PRIOR[2])


def test_few_counts_are_drawn_towards_the_stored_table():
    counts = AcceptanceCounts({(0, 0): [10, 10]})
    assert counts.table([[0.3]]) == [[(10 + WEIGHT * 0.3) / (10 + WEIGHT)]]
    assert counts.table([[0.3, 0.1]], unseen=0.5)[0][1] == 0.05
    assert sum(AcceptanceCounts({(0, 0): [900, 900]}).table([[0.5, 0.5]])[0]) <= 1 + 1e-9


def test_what_lies_behind_the_end_of_an_answer_is_not_counted_as_wrong():
    counts = AcceptanceCounts()
    step = Step(0, (1,), "", 0.01, (0,), record(cartesian(1, 1), (0, 1, 2)))
    counts.add_answer(prefilled(), [step], heads=3)
    assert dict(counts.ranks) == {(0, 0): [1, 1]}


def test_five_heads_are_counted():
    counts, deep = AcceptanceCounts(), chain(5)
    step = Step(0, (1, 2, 3, 4, 5, 9), "", 0.1, tuple(range(6)), record(deep, range(6)))
    assert counts.add_answer(prefilled(), [step], heads=5)
    assert counts.ranks[4, 0] == [1, 1]


@pytest.mark.parametrize(
    "settings, is_own",
    [
        ({}, True),
        ({"acceptance": "typical"}, False),
        ({"acceptance": "typical", "temperature": 0}, True),
        ({"acceptance": "typical-sampled"}, False),
        ({"drafter": "none"}, False),
        ({"drafter": "prompt-lookup"}, False),
    ],
)
def test_only_the_backbones_own_answers_are_counted(settings, is_own):
    assert is_counted(prefilled(**settings)) == is_own
    counts = AcceptanceCounts()
    assert counts.add_answer(prefilled(**settings), answer(random.Random(0), TREE, 5), 3) == is_own
    assert counts.steps == (5 if is_own else 0)


def test_old_counts_fade():
    counts = counted(TREE, answers=4, steps=10)
    assert counts.steps == 40
    counts.steps = MOST_STEPS
    counts.ranks[0, 0] = [60, 100]
    counts.add_answer(prefilled(), [], 3)
    assert counts.answers == 4, "an answer without a step is none"
    counts.add_answer(prefilled(), answer(random.Random(1), cartesian(1), 1), 3)
    assert counts.ranks[0, 0][1] == 50 and counts.steps < MOST_STEPS


def test_what_is_written_is_numbers_alone_and_reads_back_the_same():
    counts = counted(TREE, answers=6)
    line = json.dumps(counts.to_json())
    again = AcceptanceCounts.from_json(json.loads(line))
    assert again.to_json() == counts.to_json() and again.steps == counts.steps
    assert again.table(PRIOR) == counts.table(PRIOR)

    def leaves(value):
        if isinstance(value, dict):
            for part in value.values():
                yield from leaves(part)
        elif isinstance(value, list):
            for part in value:
                yield from leaves(part)
        else:
            yield value

    assert {type(leaf) for leaf in leaves(json.loads(line))} == {int}


@pytest.mark.parametrize(
    "harm",
    [
        lambda d: d.pop("ranks"),
        lambda d: d["ranks"].update({"0.0": [3, 2]}),
        lambda d: d["ranks"].update({"0": [1, 2]}),
        lambda d: d["ranks"].update({"a.0": [1, 2]}),
        lambda d: d["ranks"].update({"0.0": 5}),
        lambda d: d.update(answers=-1),
        lambda d: d.update(steps="x"),
    ],
)
def test_a_damaged_tally_is_refused(harm):
    values = json.loads(json.dumps(counted(TREE, answers=2, steps=5).to_json()))
    harm(values)
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError)):
        AcceptanceCounts.from_json(values)
