"""Which nodes a step drafts: the pick by costs, and the budget. Every cost here is made up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.step_costs import ACCURACIES, EXPECTED, TREE, costs_of

from medusa_chat.decoding import draft_budget as budgets
from medusa_chat.decoding.draft_budget import DraftBudget
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.runtime.step_profiler import SIZES
from medusa_chat.trees.expected_length import expected_lengths
from medusa_chat.trees.pick import pick
from medusa_chat.trees.presets import load_tree, published_accuracies

# Choosing.


def test_expectation_of_a_prefix_is_that_of_the_cut_tree():
    for nodes in (1, 4, 17, 64):
        assert EXPECTED[nodes - 1] == pytest.approx(
            expected_lengths(TREE.head(nodes), ACCURACIES)[-1]
        )


def test_pick_is_the_best_ratio_of_all_measured_sizes():
    costs = costs_of(0.02)
    best = max(
        (m for m in SIZES if m <= 64), key=lambda m: EXPECTED[m - 1] / costs.overhead(m, 100)
    )
    found = pick(costs, EXPECTED, 100)
    assert found.nodes == best > 1
    assert found.speedup == pytest.approx(EXPECTED[best - 1] / costs.overhead(best, 100))


def test_free_nodes_are_all_taken_and_dear_ones_never():
    assert pick(costs_of(0.0), EXPECTED, 100).nodes == 64
    assert pick(costs_of(1.0), EXPECTED, 100).nodes == 1


def test_the_heads_run_where_two_nodes_pay_and_the_whole_tree_does_not():
    """By candidates each step drafts what it is surest of: the tree need not pay as a whole."""
    costs = StepCosts((1, 4), (100,), ((1.0, 1.9),))
    expected = (1.0, 1.5, 1.7, 1.8)
    assert expected[3] / costs.at(4, 100) < 1
    found = DraftBudget(costs, expected, TREE.head(8)).allow(100)
    assert found.reason == budgets.HEADS and found.rate > 1


def test_plain_decoding_wins_a_tie():
    costs = StepCosts((1, 4), (100,), ((1.0, 2.0),))
    assert pick(costs, (1.0, 1.5, 1.8, 2.0), 100).nodes == 1


def test_a_long_text_gets_fewer_nodes_where_attention_makes_them_dear():
    costs = costs_of(0.005, per_token=0.0001)
    assert pick(costs, EXPECTED, 1100).nodes < pick(costs, EXPECTED, 100).nodes


def test_costs_meet_what_was_measured_and_lie_between_it():
    costs = costs_of(0.1, per_token=0.001)
    for row, length in zip(costs.seconds, costs.lengths, strict=True):
        for value, nodes in zip(row, costs.sizes, strict=True):
            assert costs.at(nodes, length) == pytest.approx(value)
    assert costs.at(6, 600) == pytest.approx((costs.at(4, 600) + costs.at(8, 600)) / 2)
    assert costs.at(16, 2100) > costs.at(16, 1100) > costs.at(16, 100)
    assert costs.at(16, 3) == costs.at(16, 100)


def test_costs_beyond_what_was_measured_stay_within_it():
    rising = StepCosts((1, 4), (100, 200), ((1.0, 2.0), (1.5, 3.0)))
    assert rising.at(1, 0) == 1.0
    falling = StepCosts((1, 4), (100, 200), ((2.0, 3.0), (1.0, 2.0)))
    assert falling.at(1, 1000) == 1.0


def test_a_step_that_no_head_drafted_is_cheaper_by_their_time():
    costs = StepCosts((1, 4), (100,), ((1.0, 2.0),), (0.2, 0.8))
    assert costs.undrafted(4, 100)[-1] == pytest.approx(1.2)


def test_more_nodes_are_never_priced_below_fewer():
    costs = StepCosts((1, 2, 4), (100,), ((1.0, 3.0, 2.0),), (0.0, 0.0, 0.0))
    assert costs.drafted(2, 4, 100) == (1.0, 3.0, 3.0, 3.0)


@pytest.mark.parametrize(
    "sizes, lengths, seconds",
    [
        ((4,), (1,), ((1.0,),)),
        ((1, 1), (1,), ((1.0, 1.0),)),
        ((1,), (), ()),
        ((1,), (1, 2), ((1.0,),)),
        ((1,), (1,), ((0.0,),)),
        ((1,), (1,), ((float("nan"),),)),
    ],
)
def test_costs_that_make_no_sense_are_refused(sizes, lengths, seconds):
    with pytest.raises(ValueError):
        StepCosts(sizes, lengths, seconds)


def test_published_accuracies_promise_what_the_paper_of_their_tree_does():
    """The published 64-node tree over the published table: about 2.5 tokens a step."""
    tree, table = load_tree("mc_sim_7b_63"), published_accuracies()
    assert 2.3 < expected_lengths(tree, table)[-1] < 2.7
    assert all(sum(row) <= 1 and list(row) == sorted(row, reverse=True) for row in table)


# Never slower than plain decoding.


def decode(budget: DraftBudget, path_lengths, length: int = 100):
    """(cost of the steps, cost of plain decoding) of steps whose path is min(nodes, asked)."""
    spent = plain = 0.0
    sizes = []
    for wanted in path_lengths:
        nodes = budget.allow(length).nodes
        sizes.append(nodes)
        tokens = min(wanted, 1 if nodes == 1 else TREE.head(nodes).depth + 1)
        budget.record(nodes, tokens)
        spent += budget.costs.at(nodes, length)
        plain += tokens * budget.costs.at(1, length)
        length += tokens
    return spent, plain, sizes


@given(
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.001),
    st.integers(1, 3000),
    st.lists(st.integers(1, 4), min_size=1, max_size=300),
)
def test_no_text_makes_the_steps_dearer_than_plain_decoding_and_a_fixed_sum(
    per_node, per_token, length, path_lengths
):
    """The budget's promise, for any costs and any acceptance: its docstring's inequality."""
    costs = costs_of(per_node, per_token)
    budget = DraftBudget(costs, EXPECTED)
    spent, plain, _ = decode(budget, path_lengths, length)
    overhead = max(costs.at(64, n) - costs.at(1, n) for n in costs.lengths)
    slack = 1e-3 * plain  # costs are looked up every 64 tokens
    stride = per_token * 64 * 64 * len(path_lengths)
    limit = (1 + budgets.SHARE) * plain + budgets.PATIENCE * overhead + slack + stride
    assert spent <= limit


def test_a_hostile_text_falls_to_plain_decoding_and_is_tried_again():
    spent, plain, sizes = decode(DraftBudget(costs_of(0.02), EXPECTED), [1] * 600)
    assert sizes[0] > 4 and sizes[100:].count(1) > 0.7 * 500
    assert 1 < max(sizes[100:]) <= 4, "it is tried again, with the smallest draft"
    assert plain / spent > 0.97


def test_a_text_that_turns_friendly_gets_its_tree_back():
    budget = DraftBudget(costs_of(0.02), EXPECTED)
    first = budget.allow(100).nodes
    decode(budget, [1] * 300)
    *_, sizes = decode(budget, [4] * 300)
    assert sizes[-1] >= first


def test_a_friendly_text_keeps_the_tuners_pick():
    dice = random.Random(0)
    costs = costs_of(0.02)
    best = pick(costs, EXPECTED, 100).nodes
    budget = DraftBudget(costs, EXPECTED[:best])
    paths = TREE.head(best).paths
    sizes = []
    for _ in range(300):
        nodes = budget.allow(100).nodes
        right = {c: dice.random() for c in range(1, 4)}  # one draw a depth, as a real token is
        tokens = 1
        for node in range(1, nodes):
            ranks = [TREE.ranks[n] for n in paths[node][1:]]
            if all(_hits(right[d + 1], d, rank) for d, rank in enumerate(ranks)):
                tokens = max(tokens, len(ranks) + 1)
        budget.record(nodes, tokens)
        sizes.append(nodes)
    assert sizes.count(best) > 0.8 * len(sizes)
    assert budget.trust == pytest.approx(1, abs=0.6)


def _hits(draw: float, depth: int, rank: int) -> bool:
    row = ACCURACIES[depth]
    return sum(row[:rank]) <= draw < sum(row[: rank + 1])


def test_where_no_draft_pays_even_a_trusted_one_is_only_tried():
    _, _, sizes = decode(DraftBudget(costs_of(1.5), EXPECTED[:4]), [4] * 200)
    assert sizes.count(1) > 0.8 * len(sizes)
