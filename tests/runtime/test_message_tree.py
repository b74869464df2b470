"""The tree of messages: versions stay, one path is shown."""

import json

import pytest

from medusa_chat.runtime.answer_figures import AnswerFigures
from medusa_chat.runtime.stored_conversation import MessageTree


def conversation():
    return MessageTree().plus("user", "q1").plus("assistant", "a1").plus("user", "q2")


def texts(tree):
    return [one.content for one in tree.path]


def test_a_message_beside_another_is_a_version_and_both_stay_reachable():
    tree = conversation().head(2).plus("user", "q2b").plus("assistant", "a2b")
    q1, _, q2, q2b, _ = tree.said
    assert texts(tree) == ["q1", "a1", "q2b", "a2b"] and tree.versions(q2b) == (q2, q2b)
    older = tree.showing(q2)
    assert texts(older) == ["q1", "a1", "q2"] and texts(older.showing(q2b)) == texts(tree)
    first = older.head(0).plus("user", "q1b")
    assert first.versions(q1) == (q1, first.leaf) and texts(first) == ["q1b"]
    assert texts(first.showing(q1)) == texts(tree)  # what came after it last


def test_a_message_goes_with_what_follows_it_and_its_id_is_not_given_again():
    tree = conversation().head(1).plus("assistant", "a1b")
    q1, a1, _, a1b = tree.said
    less = tree.without(a1)
    assert texts(less) == ["q1", "a1b"] and set(less.said) == {q1, a1b}
    none = tree.without(q1)
    assert texts(none) == [] and not none.said and none.plus("user", "x").leaf > a1b


def test_a_tree_comes_back_from_its_json():
    figures = AnswerFigures("demo", 43.25, 1.9)
    tree = conversation().head(1).plus("assistant", "a1b", "stopped", (2, 3), 0, figures)
    assert MessageTree.from_json(json.loads(json.dumps(tree.to_json()))) == tree
    assert MessageTree.from_json(MessageTree().to_json()) == MessageTree()


@pytest.mark.parametrize(
    ("figures", "line"),
    [
        (AnswerFigures("demo", 1436.4, 1.94), "demo · 1,436 tokens/s · 1.9 tokens a step"),
        (AnswerFigures("demo", 43.25, 1.0), "demo · 43.2 tokens/s · 1.0 tokens a step"),
        (AnswerFigures("demo", 43.25, 1.0, True), "demo · 43.2 tokens/s · plain"),
        (AnswerFigures("demo", None, None), "demo"),
        (AnswerFigures("demo", 43.25, None), "demo"),
    ],
)
def test_only_what_was_measured_is_told_of_an_answer(figures, line):
    assert figures.line == line


def test_ids_only_grow_whatever_the_clock_does(monkeypatch):
    monkeypatch.setattr("medusa_chat.runtime.stored_conversation.time_ns", lambda: 5_000_000)
    tree = conversation()
    one, two, three = tree.said
    assert (one, two, three) == (5000, 5001, 5002)


def test_figures_of_an_answer_that_goes_on_name_both_models_and_no_rate():
    one, two = AnswerFigures("demo", 43.25, 1.9), AnswerFigures("SmolLM2", 20.0, 1.5)
    assert two.after(one) == AnswerFigures("demo, SmolLM2")
    assert two.after(two.after(one)) == AnswerFigures("demo, SmolLM2")
    assert one.after(one) == AnswerFigures("demo") and one.after(None) is None
