"""How much a step drafts: what is learnt of costs, and the budget. Every time here is made up."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.step_costs import ACCURACIES, EXPECTED, TREE, budget_of, times_of

from medusa_chat.decoding import budget as budgets
from medusa_chat.decoding.budget import SIZES, Budget, StepTimes
from medusa_chat.trees.auto_tree import best_size
from medusa_chat.trees.expected_length import expected_lengths
from medusa_chat.trees.presets import load_tree, published_accuracies

# What a step costs.


def taught(times: StepTimes, seconds, steps: int = 200, seed: int = 0) -> StepTimes:
    """After steps of sizes 1 to 16. seconds: of nodes and the step's number -> its time."""
    dice = random.Random(seed)
    for number in range(steps):
        nodes = dice.choice((1, 1, 2, 3, 4, 6, 8, 12, 16))
        times.record(nodes, seconds(nodes, number), 0.1 * (nodes > 1), nodes > 1)
    return times


def test_costs_begin_as_the_prior():
    times = times_of(0.1, draft=0.2)
    assert times.costs()[:3] == pytest.approx((1.0, 1.1, 1.2)) and times.draft == 0.2
    assert times.plain_seconds == 0.0


@pytest.mark.parametrize("per_node", [0.01, 0.1, 0.5])
def test_costs_become_those_of_the_steps_within_an_answer(per_node):
    times = taught(times_of(0.25, draft=0.5), lambda n, _: 2.0 * (1 + per_node * (n - 1)), 160)
    costs = times.costs()
    for nodes in (1, 2, 4, 8, 16):
        assert costs[nodes - 1] == pytest.approx(1 + per_node * (nodes - 1), rel=0.25)
    assert times.draft == pytest.approx(0.05, rel=0.5)
    assert times.plain_seconds == pytest.approx(2.0, rel=0.1)


def test_sizes_that_were_not_used_follow_the_prior_s_shape():
    times = times_of(0.1)
    for _ in range(50):
        times.record(1, 1.0, 0.0, False)
        times.record(4, 2.6, 0.0, False)
    costs = times.costs()
    assert costs[3] == pytest.approx(2.6, rel=0.05)
    assert costs[15] == pytest.approx(costs[3] / 1.3 * 2.5)
    assert 1.0 < costs[1] < costs[2] < costs[3]


def test_a_busy_moment_moves_nothing():
    """One step of each size takes a hundred times as long, as where others want the cores."""
    calm, dice = times_of(0.1), random.Random(1)
    jolted = {dice.randrange(20, 200) for _ in range(8)}

    def seconds(nodes, number):
        return (100 if number in jolted else 1) * (1 + 0.3 * (nodes - 1))

    costs = taught(calm, seconds).costs()
    assert costs[3] == pytest.approx(1.9, rel=0.1) and costs[15] == pytest.approx(5.5, rel=0.1)


def test_a_first_step_that_met_a_busy_moment_is_not_believed():
    times = times_of(0.1)
    times.record(8, 500.0, 0.0, True)
    for _ in range(10):
        times.record(1, 1.0, 0.0, False)
        times.record(8, 1.7, 0.0, True)
    assert times.costs()[7] == pytest.approx(1.7, rel=0.15)


def test_another_machine_is_learnt_within_seconds():
    """What was learnt is overridden by some dozen steps."""
    times = taught(times_of(0.1), lambda n, _: 1 + 0.3 * (n - 1))
    costs = taught(times, lambda n, _: 3.0 * (1 + 0.1 * (n - 1)), 300).costs()
    assert costs[7] == pytest.approx(1.7, rel=0.1)


@given(
    st.lists(st.tuples(st.sampled_from(SIZES), st.floats(1e-6, 1e3), st.floats(0, 1)), max_size=120)
)
def test_costs_never_fall_and_never_lie_below_a_plain_step(steps):
    times = times_of(0.1)
    for nodes, seconds, draft in steps:
        times.record(nodes, seconds, draft, nodes > 1)
        costs = times.costs()
        assert costs[0] == 1.0 and list(costs) == sorted(costs) and len(costs) == 80
        assert times.draft >= 0


def test_the_first_steps_of_a_recording_do_not_count():
    times = StepTimes([1 + 0.1 * n for n in range(80)], skipped=3)
    for number in range(9):
        times.record(1, 1.0, 0.0, False)
        times.record(8, 90.0 if number < 3 else 1.4, 0.0, True)
    assert times.costs()[7] == pytest.approx(1.4, rel=0.15)


def test_where_each_step_drafts_a_plain_one_is_taken_now_and_then():
    budget = budget_of(0.01, 64, is_cut=False)
    plain = 0
    for _ in range(400):
        allowed = budget.allow()
        plain += allowed.reason == budgets.TIMED
        budget.times.record(allowed.nodes, 1.0, 0.0, allowed.nodes > 1)
        budget.record(allowed.nodes, 2 if allowed.nodes > 1 else 1, allowed.nodes > 1, 2)
    assert 3 <= plain <= 12


# Choosing.


def test_expectation_of_a_prefix_is_that_of_the_cut_tree():
    for nodes in (1, 4, 17, 64):
        assert EXPECTED[nodes - 1] == pytest.approx(
            expected_lengths(TREE.head(nodes), ACCURACIES)[-1]
        )


def test_the_best_size_has_the_most_tokens_for_its_cost():
    times = times_of(0.02, draft=0.1)
    sizes = (1, 4, 8, 16, 32, 64)
    rates = {m: EXPECTED[m - 1] / (1 + 0.02 * (m - 1) + 0.1 * (m > 1)) for m in sizes}
    assert best_size(EXPECTED, times) == max(rates, key=rates.get) > 1
    assert best_size(EXPECTED, times_of(0.0)) == 64
    assert best_size(EXPECTED, times_of(1.0)) == 1


def test_plain_decoding_wins_a_tie():
    assert best_size((1.0, 1.5), times_of(0.5)) == 1


def test_published_accuracies_promise_what_the_paper_of_their_tree_does():
    """The published 64-node tree over the published table: about 2.5 tokens a step."""
    tree, table = load_tree("mc_sim_7b_63"), published_accuracies()
    assert 2.3 < expected_lengths(tree, table)[-1] < 2.7
    assert all(sum(row) <= 1 and list(row) == sorted(row, reverse=True) for row in table)


# Never slower than plain decoding.


def decode(budget: Budget, path_lengths):
    """(cost of the steps, cost of plain decoding, sizes) of steps with paths as asked."""
    spent = plain = 0.0
    sizes = []
    for wanted in path_lengths:
        nodes = budget.allow().nodes
        sizes.append(nodes)
        tokens = min(wanted, 1 if nodes == 1 else TREE.head(nodes).depth + 1)
        budget.record(nodes, tokens, nodes > 1, tokens)
        spent += budget.times.costs()[nodes - 1] + budget.times.draft * (nodes > 1)
        plain += tokens
    return spent, plain, sizes


@given(
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.lists(st.integers(1, 4), min_size=1, max_size=300),
)
def test_no_text_makes_the_steps_dearer_than_plain_decoding_and_a_fixed_sum(
    per_node, draft, path_lengths
):
    """The budget's promise, for any costs and any acceptance: its docstring's inequality."""
    spent, plain, _ = decode(budget_of(per_node, 64, False, draft), path_lengths)
    assert spent <= (1 + budgets.SHARE) * plain + budgets.CREDIT + 1e-9


def test_a_hostile_text_falls_to_plain_decoding_and_is_tried_again():
    spent, plain, sizes = decode(budget_of(0.02, 64, False), [1] * 600)
    assert sizes[0] > 8 and sizes[100:].count(1) > 0.7 * 500
    assert max(sizes[100:]) == 8, "it is tried again, with the smallest draft"
    assert plain / spent > 0.97


def test_a_text_that_turns_friendly_gets_its_tree_back():
    budget = budget_of(0.02, 64, False)
    first = budget.allow().nodes
    decode(budget, [1] * 300)
    *_, sizes = decode(budget, [4] * 300)
    assert first > 8 and sizes[-1] >= 8


def test_a_size_that_is_hardly_better_does_not_replace_the_one_in_use():
    """Each size of a recorded tree is recorded anew."""
    budget = budget_of(0.02, 64, False)
    sizes = {budget.allow().nodes}
    dice = random.Random(2)
    for _ in range(200):
        tokens = 1 + (dice.random() < 0.6) + (dice.random() < 0.3)
        nodes = budget.allow().nodes
        sizes.add(nodes)
        budget.record(nodes, tokens, True, tokens)
    assert len(sizes) <= 4


def test_where_no_draft_pays_even_a_trusted_one_is_only_tried():
    _, _, sizes = decode(budget_of(1.5, 4, False), [4] * 200)
    assert sizes.count(1) > 0.8 * len(sizes)


def test_probabilities_that_are_too_sure_are_corrected():
    """Said 0.8, came 0.4: the correction halves them, and takes no more than some dozen steps."""
    budget, dice = budget_of(0.1), random.Random(0)
    for _ in range(60):
        budget.allow()
        budget.record(2, 1 + (right := dice.random() < 0.4), True, 1 + right, 0.8)
    assert budget.trust == pytest.approx(0.5, abs=0.15)


def test_what_was_learnt_is_told():
    budget = budget_of(0.1, draft=0.2)
    told = budget.learnt
    assert told.nodes[:4] == (1, 2, 3, 4) and told.costs[0] == 1.0
    assert told.costs[3] == pytest.approx(1.3 + 0.2) and told.steps == 0
