"""Recorded steps as chats leave them, for what is counted of them."""

import random
from collections.abc import Sequence

from medusa_chat.decoding.events import DraftRecord, Prefilled, Step
from medusa_chat.decoding.tree import Tree
from medusa_chat.training.tree_search import search_tree
from medusa_chat.trees.acceptance_counts import AcceptanceCounts

PRIOR = ((0.3, 0.2, 0.1, 0.1), (0.3, 0.2, 0.1, 0.1), (0.3, 0.2, 0.1, 0.1))
EASY, HARD = (0.9, 0.05, 0.02, 0.01), (0.2, 0.2, 0.1, 0.1)  # of any head, in half of the places
TREE = search_tree(PRIOR, 16)


def prefilled(**settings) -> Prefilled:
    chosen = {"drafter": "medusa", "acceptance": "exact", "temperature": 0.7} | settings
    return Prefilled("planted", "fp32", "cpu", chosen, (1, 2), 2, 0, (3,), "", 0.01)


def answer(dice: random.Random, tree: Tree, steps: int) -> list[Step]:
    """An answer of heads that are right together: all by EASY or all by HARD, place by place.

    The token of a place is its number; whatever a head drafts wrongly is a number below 0.
    """
    place, found = 0, []
    for index in range(steps):
        odds = EASY if dice.random() < 0.5 else HARD
        right = [dice.choices([0, 1, 2, 3, 9], [*odds, 1 - sum(odds)])[0] for _ in range(3)]
        tokens = [place] + [
            place + depth if rank == right[depth - 1] else -(1 + depth * 10 + rank)
            for depth, rank in zip(tree.depths[1:], tree.ranks[1:], strict=True)
        ]
        path = [0]
        for node in range(1, len(tree)):
            if tree.parents[node] == path[-1] and tokens[node] > 0:
                path.append(node)
        came = tuple(range(place + 1, place + len(path) + 1))
        found.append(Step(index, came, "", 0.01, tuple(path), record(tree, tokens)))
        place += len(path)
    return found


def record(tree: Tree, tokens: Sequence[int]) -> DraftRecord:
    ranks = tuple(None if rank < 0 else rank for rank in tree.ranks)
    nothing = (None,) * len(tree)
    return DraftRecord(
        tuple(tokens), tree.parents, ranks, nothing, nothing, nothing, nothing, nothing
    )


def counted(tree: Tree, answers: int = 60, steps: int = 60, seed: int = 0) -> AcceptanceCounts:
    dice, counts = random.Random(seed), AcceptanceCounts()
    for _ in range(answers):
        assert counts.add_answer(prefilled(), answer(dice, tree, steps), heads=3)
    return counts
