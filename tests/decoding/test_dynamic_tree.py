"""Trees of what the heads are sure of: the choice, whole answers, what they may cost."""

import itertools
import math
import random
from dataclasses import replace

import pytest
from support.engines import PROMPT, decode, on, tokens
from support.native_engines import native_engine
from support.shortlists import shortened
from support.step_costs import EXPECTED, TREE, budget_of, times_of

from medusa_chat.decoding import budget as budgets
from medusa_chat.decoding.budget import Allowance, Budget
from medusa_chat.decoding.drafters.builder import merge
from medusa_chat.decoding.drafters.drafter import Candidates
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import Tree
from medusa_chat.runtime.traces import from_json, to_json
from medusa_chat.trees.shapes import chain

CANDIDATES = Tree.from_choices(
    [(0,), (1,), (0, 0), (2,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 1), (1, 1)]
)


def grow(tree, shares, allowance) -> tuple[int, ...]:
    """The nodes of the tree that are drafted: each one's token is its number."""
    made = merge(Candidates(tree, range(len(tree)), shares), None, allowance)
    assert made.parents == tuple(
        made.tokens.index(tree.parents[node]) if node else -1 for node in made.tokens
    )
    assert made.ranks == tuple(tree.ranks[node] for node in made.tokens)
    return tuple(made.tokens)


def prices(per_node: float, count: int = 64) -> tuple[float, ...]:
    return tuple(1 + per_node * n for n in range(count))


def allowance(seconds: tuple[float, ...], nodes: int) -> Allowance:
    """For nodes that have to bring a token a second."""
    return Allowance(nodes, "", seconds, 1.0)


def test_of_a_number_of_nodes_it_is_the_best_tree_there_is():
    dice = random.Random(1)
    tree = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (2,), (1, 1)])
    for _ in range(30):
        shares = [math.nan, *(dice.random() for _ in tree.parents[1:])]
        worth = [1.0]
        for node in range(1, len(tree)):
            worth.append(worth[tree.parents[node]] * shares[node])
        for count in range(1, len(tree) + 1):
            free = (0.0,) * count  # nodes cost nothing, so all that are allowed are taken
            nodes = grow(tree, shares, allowance(free, count))
            assert len(nodes) == count and nodes[0] == 0
            assert all(tree.parents[node] in nodes for node in nodes[1:])
            best = max(
                sum(worth[n] for n in some)
                for some in itertools.combinations(range(1, len(tree)), count - 1)
            )
            assert sum(worth[n] for n in nodes[1:]) == pytest.approx(best)


@pytest.mark.parametrize(
    ("sure", "per_node", "count"),
    [(0.9, 0.1, 6), (0.9, 0.95, 1), (0.3, 0.2, 2), (0.05, 0.1, 1), (0.99, 0.001, 6)],
)
def test_it_has_as_many_nodes_as_are_worth_their_time(sure, per_node, count):
    shares = [math.nan] + [sure] * 5
    assert grow(chain(5), shares, allowance(prices(per_node, 6), 6)) == tuple(range(count))


def test_where_time_is_worth_more_less_is_drafted():
    shares = [math.nan] + [0.8] * 5

    def count(**what):
        return len(grow(chain(5), shares, replace(allowance(prices(0.3, 6), 6), **what)))

    assert count() > count(rate=1.8)
    assert count(nodes=2) == 2 and count(nodes=1) == 1


class Always(Budget):
    """One that allows a draft at every step."""

    def __init__(self, rate=0.7):
        super().__init__(times_of(0.01))
        self.begin(EXPECTED[:4], True)
        self.rate = rate

    def allow(self, text=()):
        super().allow()
        return Allowance(len(CANDIDATES), "always", self._by_heads, self.rate)


def budgeted(engine, budget=None, **settings):
    """The steps of an answer whose trees grow, and its tokens."""
    asked = GenerationSettings(drafter="medusa", seed=0)
    drafter = engine.drafter(asked, CANDIDATES, budget or Always())
    events = decode(engine, drafter=drafter, **settings)
    return [e for e in events if isinstance(e, Step)], events[-1].token_ids


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("rate", [0.1, 0.7])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_the_text_is_plain_decodings_whatever_runs_the_pass(
    library, family, temperature, rate, threads
):
    engine = native_engine(family, library, threads)
    plain = tokens(engine, temperature=temperature)
    engine.forget()
    ours, said = budgeted(engine, Always(rate), temperature=temperature)
    engine = on(engine, TorchStep(engine.backbone))
    engine.forget()
    theirs, said_by_torch = budgeted(engine, Always(rate), temperature=temperature)
    assert list(said) == list(said_by_torch) == list(plain)
    assert {len(step.draft.guesses) for step in ours} == {CANDIDATES.depth}
    assert max(step.nodes for step in ours) > 1 or rate > 0.5
    for a, b in zip(ours, theirs, strict=True):
        assert (a.path, a.token_ids, a.nodes) == (b.path, b.token_ids, b.nodes)
        for name in ("tokens", "parents", "ranks", "sampled", "guesses"):
            assert getattr(a.draft, name) == getattr(b.draft, name), name
        shares = zip(a.draft.draft_probabilities, b.draft.draft_probabilities, strict=True)
        assert all(x == pytest.approx(y, abs=1e-5) for x, y in shares)


def test_the_trace_keeps_what_every_head_guessed(library):
    steps, _ = budgeted(native_engine("llama", library))
    for step in steps:
        draft = step.draft
        assert from_json(to_json(step)) == step
        depths = [0]
        for node, parent in enumerate(draft.parents[1:], start=1):
            depths.append(depths[parent] + 1)
            guesses = draft.guesses[depths[node] - 1]
            assert guesses[draft.ranks[node]] == draft.tokens[node]
        assert len(draft.guesses) == CANDIDATES.depth


def test_a_step_records_all_that_the_heads_guessed_not_what_they_were_sure_of(library):
    engine, budget = native_engine("llama", library), Always()
    asked = GenerationSettings(drafter="medusa", seed=0, max_new_tokens=60)
    drafter = engine.drafter(asked, CANDIDATES, budget)
    _, *steps, _ = engine.generate(PROMPT, drafter, asked)
    assert all(len(step.draft.guesses) == CANDIDATES.depth for step in steps)


def test_guesses_are_of_the_shortlist(library):
    engine = shortened("llama", library)
    steps, said = budgeted(engine)
    listed = set(engine.heads.shortlist.tolist())
    assert {t for step in steps for row in step.draft.guesses for t in row} <= listed
    engine.forget()
    assert list(said) == list(tokens(engine))


# Never slower than plain decoding.


def spend(budget: Budget, texts):
    """(cost of the steps, cost of plain decoding, nodes) of an answer; 0 nodes: no head was asked.
    texts: of each step what every head is sure of, and the tokens that come where enough is
    drafted."""
    tree, spent, plain = TREE.head(8), 0.0, 0.0
    sizes = []
    for sure, wanted in texts:
        allowed, tokens, nodes = budget.allow(), 1, (0,)
        is_drafted = allowed.nodes > 1
        if is_drafted:
            nodes = grow(tree, [math.nan] + [sure] * (len(tree) - 1), allowed)
            tokens = min(wanted, max(tree.depths[node] for node in nodes) + 1)
        spent += allowed.costs[len(nodes) - 1] if is_drafted else 1.0
        budget.record(len(nodes), tokens, is_drafted, tokens)
        sizes.append(len(nodes) if is_drafted else 0)
        plain += tokens
    return spent, plain, sizes


@pytest.mark.parametrize("sure", [0.5, 0.95])
def test_a_text_that_no_head_foresees_falls_to_plain_decoding(sure):
    """Even where the heads are sure of it; it is tried again as seldom as the share allows."""
    budget = budget_of(0.25, draft=0.15)
    spent, plain, sizes = spend(budget, [(sure, 1)] * 600)
    assert sizes[0] > 1 and plain / spent > 0.97
    assert sizes[100:].count(0) >= 0.9 * 500 and max(sizes[100:]) > 1


def test_a_text_that_turns_friendly_is_drafted_again_at_once():
    budget = budget_of(0.25)
    spend(budget, [(0.5, 1)] * 300)
    *_, sizes = spend(budget, [(0.95, 4)] * 60)
    assert sizes[-1] > 4 and sizes[30:].count(0) == 0


def test_what_was_earned_is_spent_in_the_next_answer():
    budget = budget_of(0.25)
    spend(budget, [(0.95, 4)] * 20)
    assert spend(budget, [(0.8, 4)] * 4)[2][0] > 1


def test_of_sure_guesses_more_is_drafted_than_usual_and_of_unsure_ones_less():
    budget = budget_of(0.1)
    *_, sizes = spend(budget, [(0.95, 4), (0.25, 1), (0.05, 1)])
    assert sizes[0] > 4 >= sizes[1] > sizes[2] == 1


def test_drafting_that_costs_nothing_is_never_refused():
    budget = budget_of(0.0)
    for _ in range(3):
        *_, sizes = spend(budget, [(0.5, 4)] * 6)
        assert min(sizes) > 1


def test_the_reason_is_said():
    assert budget_of(0.1).allow().reason == "the drafter's probabilities"
    dear = budget_of(3.0)
    assert dear.allow().reason == budgets.TRIAL
    dear.credit = 0.0
    assert dear.allow().reason == budgets.NO_PAY
    cheap = budget_of(0.1)
    cheap.credit = 0.0
    assert cheap.allow().reason == budgets.SPENT
