"""The personal tree: when one is offered, that it holds what it promises, how it is kept."""

import json
import random
from dataclasses import replace

import pytest
from support.counting import PRIOR, TREE, answer, counted, prefilled
from support.scripted import ScriptedRunner, best_tree

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest, PersonalTree, TreeFacts
from medusa_chat.runtime.personal_tree import PersonalTrees, StoredCounts
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.session import Session
from medusa_chat.trees.expected_length import expected_lengths, likeliest
from medusa_chat.trees.shapes import cartesian
from medusa_chat.trees.suggestion import GAIN, suggest_tree

WIDE = Tree.from_choices([(0,), (1,), (2,), (3,), (0, 0), (1, 0), (2, 0), (3, 0)])
GENERATED = GenerationSettings(max_new_tokens=40, seed=3)


def facts_of(tree: Tree, **more) -> TreeFacts:
    return TreeFacts("key", PRIOR, tree.choices[1:], is_calibrated=True, **more)


def rate(tree: Tree, seed: int = 99) -> float:
    """Tokens a step in answers that nobody has counted."""
    steps = answer(random.Random(seed), tree, 3000)
    return sum(len(step.token_ids) for step in steps) / len(steps)


def test_a_poor_tree_is_found_and_the_better_one_is_better_where_nobody_counted():
    suggestion = suggest_tree(counted(WIDE), facts_of(WIDE), nodes=len(WIDE))
    assert suggestion is not None and suggestion.gain > GAIN
    found = Tree.from_choices(suggestion.tree.choices).head(len(WIDE))
    assert rate(found) > rate(WIDE) * 1.02
    assert 0.85 * rate(found) < suggestion.tokens < 1.05 * rate(found), "hardly too much"
    assert suggestion.now == pytest.approx(rate(WIDE), rel=0.1)


@pytest.mark.parametrize("seed", range(4))
def test_noise_alone_never_offers_a_tree(seed):
    """The best tree by many other chats is as good as it gets."""
    used = likeliest(counted(TREE, answers=200, seed=50).table(PRIOR), 16)
    assert suggest_tree(counted(used, answers=10, steps=20, seed=seed), facts_of(used), 16) is None


def test_nothing_is_offered_before_enough_is_counted():
    assert suggest_tree(counted(WIDE, answers=2, steps=60), facts_of(WIDE), len(WIDE)) is None


def test_the_search_takes_nodes_by_falling_value():
    table = counted(TREE).table(PRIOR)
    sums = expected_lengths(likeliest(table, 20), table)
    gains = [b - a for a, b in zip(sums, sums[1:], strict=False)]
    assert len(sums) == 20 and gains == sorted(gains, reverse=True)
    assert sums[15] >= expected_lengths(TREE, table)[15]


def test_step_times_decide_how_many_nodes_are_compared():
    """With dear nodes both trees shrink to the same chain, and there is nothing to offer."""
    dear = {"sizes": (1, 2, 9), "lengths": (100,), "seconds": ((1.0, 1.1, 9.0),), "date": "x"}
    counts = counted(WIDE)
    assert suggest_tree(counts, facts_of(WIDE), len(WIDE)) is not None
    assert suggest_tree(counts, facts_of(WIDE, **dear), len(WIDE)) is None


@pytest.fixture
def opened(tmp_path):
    """(session, runner, personal) on one folder, as often as asked for."""
    sessions = []

    def make():
        runner = ScriptedRunner(delay=0, prefill=0, steps=40)
        session = Session(runner)
        sessions.append(session)
        personal = PersonalTrees(session, tmp_path / "trees")
        assert session.submit(LoadRequest()).done.wait(240)
        assert session.submit(Reply("x", GENERATED)).done.wait(240)
        return session, runner, personal

    yield make
    for session in sessions:
        session.close()


def chat(session, personal) -> None:
    job = session.submit(Reply("hello", GENERATED))
    assert job.done.wait(240)
    first, *steps, _ = job.trace
    personal.count(first, steps)


def test_a_chosen_tree_is_used_kept_and_used_again_after_a_restart(opened):
    session, runner, personal = opened()
    chat(session, personal)
    tree = PersonalTree(PRIOR, cartesian(2, 2).choices[1:])
    assert personal.use(tree).done.wait(240)
    assert runner.trees == [tree] and session.state.model.tree_facts.is_personal
    session, runner, personal = opened()
    assert runner.trees == [tree], "before the first answer that was asked for later"
    assert personal.of(session.state.model.tree_facts).counts.answers == 1
    assert personal.use(None).done.wait(240)
    assert not session.state.model.tree_facts.is_personal
    _, runner, _ = opened()
    assert runner.trees == []


def test_a_tree_that_was_taken_is_not_offered_again(opened):
    session, _, personal = opened()
    model = replace(session.state.model, tree_facts=facts_of(WIDE), nodes=len(WIDE))
    personal.of(model.tree_facts).counts = counted(WIDE)
    found = personal.suggestion(model)
    taken = facts_of(Tree.from_choices(found.tree.choices))
    assert personal.suggestion(replace(model, tree_facts=taken)) is None


def test_a_broken_file_is_set_aside_and_counting_begins_anew(opened, tmp_path):
    folder = tmp_path / "trees"
    folder.mkdir()
    (folder / "scripted.json").write_text('{"version": 1, "folds": [')
    session, _, personal = opened()
    chat(session, personal)
    assert [f for f in folder.iterdir() if "corrupt" in f.name]
    kept = StoredCounts.from_json(json.loads((folder / "scripted.json").read_text()))
    assert kept.counts.answers == 1 and kept.tree is None


@pytest.mark.parametrize(
    "tree",
    [
        {"accuracies": [[2.0]], "choices": [[0]]},
        {"accuracies": [[0.5]], "choices": [[0, 0]]},
        {"accuracies": 3, "choices": []},
        5,
    ],
)
def test_a_kept_tree_that_is_none_is_refused(tree):
    values = json.loads(json.dumps(StoredCounts().to_json())) | {"tree": tree}
    with pytest.raises((ValueError, KeyError, TypeError, AttributeError, UsageError)):
        StoredCounts.from_json(values)


def test_a_disk_that_cannot_be_written_costs_only_the_memory(opened, tmp_path):
    (tmp_path / "trees").write_text("a file where the folder should be")
    session, _, personal = opened()
    chat(session, personal)
    assert personal.of(session.state.model.tree_facts).counts.answers == 1


def test_an_answer_of_another_model_is_not_counted(opened):
    session, _, personal = opened()
    personal.count(prefilled(), answer(random.Random(0), best_tree(8, 3), 5))
    assert personal.of(session.state.model.tree_facts).counts.steps == 0
    personal.count(None, [])


def test_without_a_model_there_is_no_tree_to_choose():
    personal = PersonalTrees(Session(ScriptedRunner()))
    with pytest.raises(UsageError, match="load one first"):
        personal.use(None)
