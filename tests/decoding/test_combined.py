"""One tree from the heads and the text: what the text offers, the merge, the budget, answers."""

import itertools
import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engines import PROMPT, TREES, decode, engine_of, tokens
from support.families import FAMILIES, VOCABULARY, tiny
from support.step_costs import EXPECTED, TREE, budget_of, times_of

from medusa_chat.decoding import budget as budgets
from medusa_chat.decoding.budget import Allowance, Budget
from medusa_chat.decoding.draft import with_chain
from medusa_chat.decoding.drafters.builder import merge
from medusa_chat.decoding.drafters.continuation import DEPTH, LEAST, PRIOR, Continuation, Guess
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.drafters.lookup import PromptLookup
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.tree import ROOT, Tree
from medusa_chat.runtime.traces import from_json, to_json
from medusa_chat.trees.shapes import chain

FREE = Allowance(64, "")


def guess_of(*pairs: tuple[int, float]) -> Guess:
    rates = [rate for _, rate in pairs]
    reached = tuple(itertools.accumulate(rates, lambda a, b: a * b))
    return Guess(tuple(token for token, _ in pairs), tuple(rates), reached)


# What the text offers.


def test_what_followed_the_last_tokens_is_guessed():
    text = Continuation()
    text.read([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4])
    found = text.guess(3)
    assert found is not None and found.tokens == (5, 6, 7)
    assert all(a > b for a, b in itertools.pairwise(found.reached))
    assert text.guess(0) is None


def test_a_text_of_new_tokens_offers_nothing():
    text = Continuation()
    text.read(list(range(20)))
    assert text.guess(10) is None


def test_a_period_goes_on_beyond_the_end_of_the_text():
    text = Continuation()
    text.read([1, 2, 3, 1, 2, 3, 1, 2, 3])
    assert text.guess(7).tokens == (1, 2, 3, 1, 2, 3, 1)


def test_a_guess_has_no_more_tokens_than_a_tile_has_rows():
    text = Continuation()
    for token in [1, 2] * 60:
        text.read([token])
    assert len(text.guess(100).tokens) == DEPTH


def test_a_long_match_goes_before_a_later_short_one():
    text = Continuation()
    text.read([1, 2, 3, 4, 50, 3, 4, 60, 1, 2, 3, 4])
    assert text.guess(1).tokens == (50,)


def test_hits_inside_the_prompt_are_not_counted():
    text = Continuation()
    text.read([1, 2] * 20)
    assert text.guess(1).rates == (PRIOR[-1],)


def test_what_follows_is_not_copied_where_matches_always_fail():
    text = Continuation()
    text.read([5])
    for token in range(10, 60):
        text.read([token, 5])
    assert text.following(4) == ()


def test_matches_that_fail_are_guessed_no_more_and_come_back_when_they_hit():
    dice, text = random.Random(0), Continuation()
    text.read([5, 6])
    for _ in range(120):
        text.read([5, dice.randrange(10, 90)])
    text.read([5])
    assert text.guess(4) is None or text.guess(4).reached[0] < 0.2
    for _ in range(12):
        text.read([1, 2, 3, 4, 6, 7, 8])
    assert text.guess(4).reached[3] > 0.6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_a_guess_is_what_stood_after_the_same_tokens(ids, depth):
    text, at = Continuation(), len(ids) // 2
    text.read(ids[:at] or ids[:1])
    for token in ids[max(at, 1) :]:
        text.read([token])
    found = text.guess(depth)
    if found is not None:
        assert 1 <= len(found.tokens) <= min(depth, DEPTH)
        whole = [*ids, *found.tokens]
        first = found.tokens[0]
        assert any(whole[n - 1] == ids[-1] and whole[n] == first for n in range(1, len(ids)))
        assert all(LEAST <= w <= 1 for w in found.reached)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 12))
def test_what_follows_is_as_long_as_asked_and_goes_on_as_a_period(ids, count):
    text = Continuation()
    text.read(ids)
    found = list(text.following(count))
    assert len(found) in (0, count)
    places = [n for n in range(1, len(ids)) if ids[n - 1] == ids[-1]]
    assert bool(found) == bool(places), "every token is looked for"
    ways = [ids[n:] * count for n in places]
    assert not found or found in [way[:count] for way in ways]


def test_prompt_lookup_drafts_a_chain_of_one_length_after_the_longest_match():
    drafter = PromptLookup(6, torch.device("cpu"))
    made = drafter.plan([1, 2, 7, 8, 0, 1, 2, 7, 9, 0, 3, 2, 5, 0, 1, 2], 20)
    assert made.tree == chain(5) and made.text.tolist() == [7, 9, 0, 3, 2]
    draft = drafter.fill(made, torch.tensor([2]), None, True)
    assert draft.tokens.tolist() == [2, 7, 9, 0, 3, 2]
    again = drafter.plan([7, 9], 20)
    assert again.tensors is made.tensors and again.text.tolist() == [0, 3, 2, 5, 0]
    assert drafter.plan([7], 3).tree == chain(3), "the context has room for no more"
    assert len(drafter.plan([4], 20).tree) == 1, "no match"
    assert len(PromptLookup(1, torch.device("cpu")).plan([1, 1, 1], 5).tree) == 1


# The merged tree.

CANDIDATES = Tree.from_choices([(0,), (1,), (0, 0), (0, 1)])
HEADS = [9, 11, 12, 21, 22]
SHARES = [math.nan, 0.5, 0.3, 0.4, 0.2]


def merged(shares, guess, allowance):
    return merge(Candidates(CANDIDATES, HEADS, shares), guess, allowance)


def test_a_token_of_both_is_one_node():
    made = merged(SHARES, guess_of((11, 0.9), (21, 0.9), (31, 0.9)), FREE)
    assert made.tokens == [9, 11, 12, 21, 22, 31]
    assert made.parents == (-1, 0, 0, 1, 1, 3)
    assert made.sources == (None, "both", "heads", "both", "heads", "text")
    assert math.isnan(made.shares[5]) and made.shares[3] == 0.4


def test_where_the_text_is_surer_its_tokens_siblings_give_way():
    few = Allowance(4, "")
    made = merged(SHARES, guess_of((7, 0.9), (8, 0.9), (9, 0.9)), few)
    assert made.tokens == [9, 7, 8, 9] and made.parents == (-1, 0, 1, 2)
    weak = merged(SHARES, guess_of((7, 0.2)), few)
    assert weak.sources == (None, "heads", "heads", "text") or "text" not in weak.sources


def test_siblings_of_the_texts_token_share_what_is_left():
    """0.9 for the text's 11 leaves 12 a fifth of its 0.3: 22 below it and 21 are worth more."""
    shares = [math.nan, 0.5, 0.3, 0.4, 0.2]
    made = merged(shares, guess_of((11, 0.9)), Allowance(4, ""))
    assert made.tokens == [9, 11, 21, 22]


def test_of_a_token_of_both_the_surer_share_counts():
    shares = [math.nan, 0.5, 0.45, 0.4, 0.2]
    made = merged(shares, guess_of((11, 0.1)), Allowance(2, ""))
    assert made.tokens == [9, 11]


def test_a_share_that_is_no_number_counts_as_none_and_one_above_1_as_1():
    made = merged([math.nan, math.nan, *SHARES[2:]], None, Allowance(2, ""))
    assert made.tokens == [9, 12]
    dear = Allowance(3, "", (1.0, 2.1, 2.1), 1.0)
    assert merge(Candidates(chain(1), [9, 11], [math.nan, 1.2]), None, dear).tokens == [9]


def test_only_what_is_worth_its_time_is_drafted():
    dear = Allowance(8, "", tuple(1 + 0.5 * n for n in range(8)), 1.0)
    made = merged(SHARES, guess_of((11, 0.9), (31, 0.9), (32, 0.5)), dear)
    assert made.tokens == [9, 11, 31]


@given(
    st.lists(st.floats(0, 1.0001) | st.just(math.nan), min_size=4, max_size=4),
    st.lists(st.tuples(st.sampled_from([*HEADS, 31, 32]), st.floats(0.1, 1)), max_size=6),
    st.integers(1, 12),
)
def test_any_merged_tree_is_a_tree_of_different_paths(shares, pairs, nodes):
    made = merged([math.nan, *shares], guess_of(*pairs), Allowance(nodes, ""))
    tree = Tree(made.parents, made.ranks)
    paths = {tuple(made.tokens[n] for n in path) for path in tree.paths}
    assert len(paths) == len(tree) <= nodes
    assert len(tree) == min(nodes, len(paths)) and made.sources[0] is None


# The budget.


SURE = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7)


def test_a_sure_continuation_is_drafted_without_the_heads():
    found = budget_of(0.1).allow(SURE)
    assert found.by_text and not found.by_heads and found.reason == budgets.TEXT
    assert 2 <= found.nodes <= len(SURE) + 1


def test_an_unsure_one_is_drafted_beside_the_heads_or_not_at_all():
    assert budget_of(0.02).allow((0.4,)).reason == budgets.BOTH
    plain = budget_of(0.1)
    assert plain.allow((0.02,)) == budget_of(0.1).allow()


def test_where_heads_never_pay_the_text_still_may():
    budget = budget_of(0.3, usual=1)
    assert budget.allow().nodes == 1
    assert budget.allow(SURE).reason == budgets.TEXT
    assert budget.allow((0.1,)).nodes == 1


def test_nodes_of_the_text_do_not_change_the_trust_in_the_heads():
    budget = budget_of(0.1)
    budget.allow(SURE)
    budget.record(5, 5, True, 5)
    assert budget.trust == pytest.approx(budgets.TRUST)
    budget.allow((0.4,))
    budget.record(5, 4, True, 1)
    assert budget.trust < budgets.TRUST


def test_the_text_neither_spends_nor_earns_what_trials_of_the_heads_may_cost():
    def failed(budget, most=99):
        """How many drafts of the heads fail until none is tried."""
        count = 0
        while count < most and budget.allow().nodes > 1:
            budget.record(2, 1, True, 1)
            count += 1
        return count

    budget = budget_of(0.8)  # what the heads draft never pays, what the text offers does
    some = failed(budget, 1)
    for _ in range(20):
        nodes = budget.allow(SURE).nodes
        budget.record(nodes, nodes, True, 1)
    fresh = failed(budget_of(0.8))
    assert some < fresh <= some + failed(budget) <= fresh + 1


def test_what_a_friendly_text_earned_is_not_spent_on_a_hostile_one():
    budget, lost = budget_of(0.1), 0.0
    for _ in range(50):
        budget.record(budget.allow(SURE).nodes, 4, True, 1)
    for _ in range(200):
        nodes = budget.allow(SURE).nodes
        budget.record(nodes, 1, nodes > 1, 1)
        lost += budget._by_text[nodes - 1] - 1
    assert 0 < lost <= 200 * budgets.SHARE + budgets.CREDIT


@given(
    st.floats(0.0, 2.0),
    st.floats(0.0, 1.0),
    st.sampled_from([1, 8]),
    st.lists(
        st.tuples(st.integers(0, 10), st.floats(0.1, 1), st.integers(1, 11)),
        min_size=1,
        max_size=200,
    ),
)
def test_no_text_makes_the_steps_dearer_than_plain_decoding_and_a_fixed_sum(
    per_node, draft, usual, steps
):
    """The budget's promise, whatever the text offers and however wrong it is."""
    budget = budget_of(per_node, usual, usual > 1, draft)
    spent = plain = 0.0
    for count, rate, wanted in steps:
        allowed = budget.allow(tuple(rate**n for n in range(1, count + 1)))
        nodes = allowed.nodes
        given = min(wanted, nodes)
        costs = allowed.costs or (1.0,)
        spent += costs[min(nodes, len(costs)) - 1]
        budget.record(nodes, given, nodes > 1, given)
        plain += given
    assert spent <= (1 + budgets.SHARE) * plain + budgets.CREDIT + 1e-9


# Answers.

REPEATING = [3, 4, 5, 6, 7, 8, 9, 10, 3, 4, 5]


def repeating(engine):
    """The engine after whose LM head the text repeats itself: what it says is a cycle."""
    return [*PROMPT, *tokens(engine, max_new_tokens=24)]


class Tuned(Budget):
    """Of cheap nodes, that cuts drafts."""

    def __init__(self, per_node=0.02):
        super().__init__(times_of(per_node))
        self.begin(EXPECTED[:4], True)


FOUR = TREE.head(4)


def drafter_of(engine, budget, tree=None, **asked):
    tree = tree or (FOUR if budget is None else CANDIDATES)
    settings = GenerationSettings(drafter="auto", seed=0, nodes=len(tree), **asked)
    return engine.drafter(settings, tree, budget)


def steps_of(events) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_text_is_plain_decodings(family, temperature):
    engine = engine_of(tiny(family))
    prompt = [*PROMPT, *tokens(engine, temperature=temperature)] * 2
    plain = tokens(engine, prompt, temperature=temperature)
    for make in (Tuned, lambda: Tuned(1.5), lambda: None):
        for details in (True, False):
            options = {"details": details, "temperature": temperature}
            assert tokens(engine, prompt, drafter_of(engine, make()), **options) == plain


@pytest.mark.parametrize("acceptance", ["typical", "typical-sampled"])
def test_an_answer_that_the_tree_may_change_is_the_same_each_time(acceptance):
    engine, said = engine_of(tiny("llama")), []
    for _ in range(3):
        drafter = drafter_of(engine, Tuned(), acceptance=acceptance, temperature=0.8)
        engine.forget()
        events = decode(engine, drafter=drafter, acceptance=acceptance, temperature=0.8)
        said.append([(step.path, step.token_ids) for step in steps_of(events)])
    assert said[0] == said[1] == said[2]


def test_a_step_says_what_proposed_each_node():
    engine = engine_of(tiny("llama"))
    prompt = repeating(engine) * 2
    events = decode(engine, prompt, drafter_of(engine, Tuned()), max_new_tokens=40)
    found = [step.draft for step in steps_of(events)]
    named = [draft for draft in found if draft.sources]
    assert named and {s for draft in named for s in draft.sources} >= {None, "text"}
    for step in steps_of(events):
        assert from_json(to_json(step)) == step
    for draft in named:
        assert len(draft.sources) == len(draft.tokens) and draft.sources[0] is None
        for node, source in enumerate(draft.sources[1:], start=1):
            is_text = source == "text"
            assert (draft.ranks[node] is None) == is_text
            assert is_text <= (draft.draft_probabilities[node] is None)


def test_a_text_that_repeats_is_drafted_without_asking_the_heads():
    engine = engine_of(tiny("llama"))
    engine.backbone.lm_head.linear.weight.zero_()  # it says token 0 for ever
    events = decode(engine, drafter=drafter_of(engine, Tuned(0.1)), max_new_tokens=80)
    steps = steps_of(events)
    assert steps[-2].budget == budgets.TEXT and len(steps[-2].token_ids) > 4
    assert not steps[-2].draft.guesses


def test_where_the_text_offers_nothing_it_is_the_heads_tree():
    engine = engine_of(tiny("llama"))
    prompt = list(range(1, 9))
    found = {}
    for name in ("auto", "medusa"):
        settings = GenerationSettings(drafter=name, seed=0, nodes=4)
        engine.forget()
        drafter = engine.drafter(settings, TREE.head(4))
        found[name] = steps_of(decode(engine, prompt, drafter, max_new_tokens=2))[0].draft
    assert found["auto"] == found["medusa"]


def test_nodes_are_never_more_than_were_asked_for():
    engine = engine_of(tiny("llama"))
    prompt = repeating(engine) * 2
    for tree in (TREES["dense"], TREES["walkthrough"], chain(1), ROOT):
        drafter = drafter_of(engine, None, tree=tree)
        steps = steps_of(decode(engine, prompt, drafter, max_new_tokens=40))
        assert max(step.nodes for step in steps) <= len(tree)


@pytest.mark.parametrize("fault", [math.nan, math.inf])
def test_broken_heads_change_nothing(fault):
    engine = engine_of(tiny("qwen3"))
    prompt = [*PROMPT, *tokens(engine)] * 2
    plain = tokens(engine, prompt)
    engine.heads.weight.fill_(fault)
    for budget in (Tuned(), None):
        assert tokens(engine, prompt, drafter_of(engine, budget)) == plain


def test_bf16_too():
    model = tiny("llama").to(torch.bfloat16)
    engine = engine_of(model)
    for temperature in (0.0, 0.8):
        prompt = [*PROMPT, *tokens(engine, temperature=temperature)] * 2
        plain = tokens(engine, prompt, temperature=temperature)
        for budget in (Tuned(), None):
            drafter = drafter_of(engine, budget)
            assert tokens(engine, prompt, drafter, temperature=temperature) == plain
    assert VOCABULARY > max(plain)


def test_a_chain_that_training_asked_for_first_serves_answers():
    """Training answers within inference mode, and what is made there cannot be written outside."""
    device, tokens = torch.device("cpu"), list(range(13))
    with torch.inference_mode():
        with_chain(ROOT, 1, 0, [0] * len(tokens), device)
    plan = with_chain(ROOT, 1, 0, tokens, device)
    assert plan.text is not None and plan.text.tolist() == tokens
