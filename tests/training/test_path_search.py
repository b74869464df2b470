"""The tree searched from whole answers: what it counts is what decoding would do."""

import random

import pytest

from medusa_chat.decoding.tree import Tree
from medusa_chat.errors import UsageError
from medusa_chat.trees.calibration import search_paths, step_positions, tokens_per_step

TOGETHER = [[0, 0], [1, 1], [0, 0], [1, 1], [None, None], [0, 0], [1], []]


def random_answers(seed, count=60):
    chance = random.Random(seed)
    rows = [[chance.choice([0, 0, 0, 1, 2, None]) for _ in range(3)] for _ in range(count * 12)]
    return [rows[at : at + 12] for at in range(0, len(rows), 12)]


def test_steps_begin_where_the_accepted_path_ended():
    tree = Tree.from_choices([(0,), (0, 0)])
    assert list(step_positions(TOGETHER, tree)) == [0, 3, 4, 5]
    assert tokens_per_step([TOGETHER], tree) == 7 / 4
    assert tokens_per_step([TOGETHER], Tree.from_choices([])) == 1.0


def test_the_first_nodes_are_always_a_tree_and_more_nodes_never_give_less():
    answers = random_answers(1)
    tree = search_paths(answers, 20, 8)
    rates = [tokens_per_step(answers, tree.head(n)) for n in range(1, len(tree) + 1)]
    assert len(tree) == 20 and rates[0] == 1.0 and rates[-1] > rates[7] > 1.2


def test_paths_that_go_together_are_found_where_products_would_miss_them():
    # (0, 0) and (1, 1) happen, (0, 1) and (1, 0) never do: by products all four are alike
    answers = [[[r, r], [None, None], [None, None]] for r in (0, 1)] * 10
    tree = search_paths(answers, 5, 5)
    assert set(tree.choices[1:]) == {(0,), (1,), (0, 0), (1, 1)}


def test_the_search_is_hardly_beaten_by_any_of_many_random_trees():
    answers = random_answers(2)
    found = tokens_per_step(answers, search_paths(answers, 6, 6))
    chance = random.Random(3)
    for _ in range(200):
        choices = [()]
        while len(choices) < 6:
            parent = chance.choice([c for c in choices if len(c) < 3])
            child = (*parent, chance.randrange(3))
            if child not in choices:
                choices.append(child)
        other = Tree.from_choices(sorted(choices[1:], key=lambda c: (len(c), c)))
        assert tokens_per_step(answers, other) <= 1.03 * found


def test_answers_without_anything_foreseen_are_refused():
    with pytest.raises(UsageError, match="predicted no token"):
        search_paths([[[None], [None]]], 8, 8)
