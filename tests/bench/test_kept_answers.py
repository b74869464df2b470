"""Studies that learn from the answers that a training kept."""

import json
import random
from dataclasses import replace

import pytest
import torch

from medusa_chat.bench.studies import head_shapes, kept_stages
from medusa_chat.bench.studies.kept_answers import (
    last_answer,
    ranks_among,
    read_kept,
    states_before,
)
from medusa_chat.errors import UsageError
from medusa_chat.training.accuracy import ranks_of
from medusa_chat.training.data import Example
from medusa_chat.training.short_vocabulary import ShortVocabulary
from medusa_chat.training.trainer import new_heads


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    rows, draw = [], random.Random(0)
    for _ in range(12):
        said = "".join(draw.choices("abcdefghijkl", k=16))  # too few for a shortlist
        texts = [("user", said[:8]), ("assistant", said), ("user", "more"), ("assistant", said)]
        rows.append({"messages": [{"role": role, "content": text} for role, text in texts]})
    found = tmp_path_factory.mktemp("kept") / "out.answers.jsonl"
    found.write_text("\n".join(map(json.dumps, rows)) + "\n", "utf-8")
    return found


@pytest.fixture
def context(context, answers):
    return replace(context, data=answers)


def test_the_last_answer_alone_is_learnt_up_to_its_end():
    mixed = Example(tuple(range(9)), (False, True, False, False, True, True, True, False, False))
    found = last_answer(mixed)
    assert found.ids == tuple(range(7)) and found.is_label == (False,) * 4 + (True,) * 3
    assert last_answer(Example((1, 2, 3), (True,) * 3)) is None  # a text without a prompt
    assert last_answer(Example((1, 2, 3), (False, True, True))) is None


def test_ranks_are_those_of_the_whole_vocabulary_where_that_is_learnt(context):
    kept = read_kept(context)
    model = kept.backbone()
    short = kept.short(model)
    heads = new_heads(model.get_output_embeddings(), 5)
    with torch.no_grad():
        heads.bias.normal_(generator=torch.Generator().manual_seed(0))
    states = states_before(model, kept.held_out)
    for found, (_, example) in zip(ranks_among(short, heads, states), states, strict=True):
        assert [found] == ranks_of(model, heads, example)


def test_a_token_outside_the_shortlist_has_no_rank(context):
    kept = read_kept(context)
    model = kept.backbone()
    whole = kept.short(model)
    short = ShortVocabulary.of([7, 9], whole.lm_head)
    states = states_before(model, kept.held_out[:2])
    for found, (hidden, example) in zip(
        ranks_among(short, new_heads(model.get_output_embeddings(), 1), states), states, strict=True
    ):
        answer = example.ids[-len(hidden) :]
        for place, row in enumerate(found[:-1]):
            assert (row[0] is not None) == (answer[place + 1] in (7, 9))


def test_nothing_that_is_measured_was_learnt(context):
    kept = read_kept(context)
    assert len(kept.learnt) == len(kept.held_out) == 6
    assert {e.place for e in kept.learnt}.isdisjoint(e.place for e in kept.held_out)
    few = replace(context, data=context.data.parent / "few.jsonl")
    few.data.write_text(context.data.read_text("utf-8").split("\n")[0] + "\n", "utf-8")
    with pytest.raises(UsageError, match="at least four"):
        read_kept(few)


def test_heads_are_compared_by_number_lm_head_and_root(study, answers, monkeypatch):
    monkeypatch.setattr(head_shapes, "SEEDS", (0,))
    short = replace(head_shapes.ALONE, steps=3, batch_labels=16)
    monkeypatch.setattr(head_shapes, "ALONE", short)
    rows = study("heads", data=answers)
    assert len(rows) == 4 * 5
    for count in range(1, 6):
        for kind in ("with the root, shared", "without the root, own"):
            found = rows[f"{kind} LM head, {count} head{'s' * (count > 1)}"]
            assert 1 <= found["value"] <= count + 1
            assert "3 steps of 16 labels" in found["note"]


def test_only_the_backbone_of_medusa_2_moves(study, answers, monkeypatch):
    monkeypatch.setattr(kept_stages, "STEPS", 4)
    monkeypatch.setattr(kept_stages, "DIRECT_RATE", 0.05)
    rows = study("two-stage", data=answers)
    moved = {name: row["value"] for name, row in rows.items() if row["unit"] == "nats/token"}
    assert moved.pop("medusa-1: KL from the backbone before") == 0
    assert len(moved) == 2 and all(value > 0 for value in moved.values())
    assert rows["medusa-1"]["ratio"] == 1
    assert (
        "2 steps of 384 labels of the heads alone, 2 of both"
        in rows["medusa-2, two stages"]["note"]
    )
    assert 1 <= rows["medusa-2, direct"]["value"] <= 6


def test_each_number_of_heads_has_a_tree_of_its_own(study):
    rows = study("head-count", nodes=8)
    for count in range(1, 6):
        name = f"{count} head{'s' * (count > 1)}, 8 nodes"
        assert 1 <= rows[name]["value"] <= count + 1
        assert rows[f"{name}: speed"]["against"] == "plain"
