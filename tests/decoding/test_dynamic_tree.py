"""Trees of what the heads are sure of: the choice, its C twin, whole answers, what it may cost."""

import ctypes
import itertools
import math
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.engines import PROMPT, decode, tokens
from support.native_engines import native_engine
from support.shortlists import shortened
from support.step_costs import EXPECTED, TREE, costs_of

from medusa_chat.decoding import candidate_budget as growing
from medusa_chat.decoding.acceptance import TORCH
from medusa_chat.decoding.backends import native
from medusa_chat.decoding.backends.native.account import NativeAccount
from medusa_chat.decoding.backends.native.structs import Growth as GrowthJob
from medusa_chat.decoding.backends.native.verify import NativeVerifier
from medusa_chat.decoding.candidate_budget import Grower
from medusa_chat.decoding.drafters import TreeTensors
from medusa_chat.decoding.dynamic_tree import ASKED_EVERY, DynamicTree, grow, subtree
from medusa_chat.decoding.events import Step, from_json, to_json
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_costs import SIZES, StepCosts
from medusa_chat.decoding.tree import Tree, cartesian, chain
from medusa_chat.trees.acceptance_counts import AcceptanceCounts, drafted_ranks

CANDIDATES = Tree.from_choices(
    [(0,), (1,), (0, 0), (2,), (0, 0, 0), (0, 1), (1, 0), (0, 0, 1), (1, 1)]
)
CHEAP = costs_of(0.01)


def prices(per_node: float, count: int = 64) -> tuple[float, ...]:
    return tuple(1 + per_node * n for n in range(count))


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
            nodes = grow(tree, shares, DynamicTree(free, count, 1.0))
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
    assert grow(chain(5), shares, DynamicTree(prices(per_node, 6), 6, 1.0)) == tuple(range(count))


def test_where_time_is_worth_more_less_is_drafted():
    shares = [math.nan] + [0.8] * 5

    def count(**what):
        return len(grow(chain(5), shares, replace(DynamicTree(prices(0.3, 6), 6, 1.0), **what)))

    assert count() > count(rate=1.8)
    assert count(most=2) == 2 and count(most=1) == 1


@given(st.integers(0, 10_000))
def test_the_c_twin_chooses_the_same(library, seed):
    dice = random.Random(seed)
    tree = dice.choice([CANDIDATES, cartesian(3, 2, 2), chain(5), TREE])
    shares = [math.nan, *(dice.random() ** dice.choice([0.2, 1, 3]) for _ in tree.parents[1:])]
    held = torch.tensor(shares)
    most = dice.randint(1, len(tree) + 3)
    growth = DynamicTree(prices(dice.random() / 3, most), most, dice.random() * 2)
    nodes = grow(tree, held.tolist(), growth)

    tensors, n = TreeTensors.of(tree, torch.device("cpu")), len(tree)
    mask = torch.zeros(n, n).masked_fill_(~tensors.ancestors, -torch.inf)
    seconds = (ctypes.c_double * most)(*growth.seconds)
    own, own_mask = torch.full((3, n), -7), torch.ones(n, n)
    job = GrowthJob(tensors.parents.data_ptr(), tensors.depths.data_ptr(), mask.data_ptr())
    job.seconds, job.rate = ctypes.addressof(seconds), growth.rate
    job.nodes = job.stride = n
    job.most, job.own_mask = min(most, n), own_mask.data_ptr()
    job.chosen, job.own_parents, job.own_depths = (row.data_ptr() for row in own)
    library.grow(ctypes.byref(job), ctypes.c_void_p(held.data_ptr()))

    assert tuple(own[0, : job.count].tolist()) == nodes and not (own[:, job.count :] != -7).any()
    made = TreeTensors.of(subtree(tree, nodes), torch.device("cpu"))
    assert torch.equal(own[1, : job.count], made.parents)
    assert torch.equal(own[2, : job.count], made.depths)
    assert job.deepest == int(made.depths.max())
    assert torch.equal(own_mask[: job.count, : job.count] == 0, made.ancestors)


class Always(Grower):
    """One that has earned enough, or is sure enough, to draft at every step."""

    def __init__(self, gate=0.0, candidates=CANDIDATES):
        super().__init__(CHEAP, EXPECTED[:4], candidates)
        self.proof, self.sure, self.strict = 0, gate, 0.7 / self._costs_at(0)[3]
        self.most = self.credit = math.inf

    def look_up(self, length):
        super().look_up(length)
        self.balance = -math.inf  # so that it is never rich


def governed(engine, grower=None, **settings):
    """The steps of an answer whose trees grow, and its tokens."""
    asked = GenerationSettings(drafter="medusa", seed=0)
    drafter = engine.drafter(asked, TREE.head(4), True, grower or Always())
    events = decode(engine, drafter=drafter, **settings)
    return [e for e in events if isinstance(e, Step)], events[-1].token_ids


def usual_first(engine, temperature) -> float:
    """The median probability of the first head's best guess."""
    steps, _ = governed(engine, temperature=temperature)
    engine.forget()
    first = [p for step in steps for p in step.draft.draft_probabilities[1:2]]
    return sorted(first)[len(first) // 2]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_the_text_is_plain_decodings_in_one_call_and_by_parts(
    library, family, temperature, has_gate, threads
):
    engine = native_engine(family, library, threads)
    gate = usual_first(engine, temperature) if has_gate else 0.0
    plain = tokens(engine, temperature=temperature)
    engine.forget()
    whole, said = governed(engine, Always(gate), temperature=temperature)
    engine.forget()
    engine.backbone.whole_step = None
    parts, said_by_parts = governed(engine, Always(gate), temperature=temperature)
    assert list(said) == list(said_by_parts) == list(plain)
    assert {bool(step.draft.guesses) for step in whole} == {True}
    asked = {len(step.draft.guesses) for step in whole}
    assert asked == ({1, CANDIDATES.depth} if has_gate else {CANDIDATES.depth})
    for a, b in zip(whole, parts, strict=True):
        assert (a.path, a.token_ids, a.nodes) == (b.path, b.token_ids, b.nodes)
        for name in ("tokens", "parents", "ranks", "sampled", "guesses"):
            assert getattr(a.draft, name) == getattr(b.draft, name), name
        shares = zip(a.draft.draft_probabilities, b.draft.draft_probabilities, strict=True)
        assert all(x == pytest.approx(y, abs=1e-5) for x, y in shares)


def test_a_gate_that_is_shut_leaves_the_root_where_one_head_is_asked(library):
    found = []
    for is_whole in (True, False):
        engine = native_engine("llama", library)
        if not is_whole:
            engine.backbone.whole_step = None
        steps, said = governed(engine, Always(2.0, Tree.from_choices([(0,), (1,), (2,)])))
        found.append(([step.nodes for step in steps], said))
    sizes = found[0][0]
    assert found[0] == found[1] and {*sizes} == {1, 4}
    assert [number for number, size in enumerate(sizes) if size > 1] == [
        number for number in range(len(sizes)) if number % ASKED_EVERY == ASKED_EVERY - 1
    ]


def test_the_trace_keeps_what_every_head_guessed(library):
    steps, _ = governed(native_engine("llama", library))
    for step in steps:
        draft = step.draft
        assert from_json(to_json(step)) == step
        ranks = drafted_ranks(draft, 3)
        depths = [0]
        for node, parent in enumerate(draft.parents[1:], start=1):
            depths.append(depths[parent] + 1)
            guesses = draft.guesses[depths[node] - 1]
            assert guesses[draft.ranks[node]] == draft.tokens[node]
            assert ranks[depths[node] - 1][draft.tokens[node]] == draft.ranks[node]
        assert len(draft.guesses) == CANDIDATES.depth


def test_heads_are_judged_by_all_they_guessed_not_by_what_they_were_sure_of(library):
    """Only sure guesses are drafted, and only where it looks sure any head is asked: counting
    those steps alone would flatter the heads. Every eighth asks them all, and is counted."""
    engine, grower = native_engine("llama", library), Grower(CHEAP, EXPECTED[:4], CANDIDATES)
    asked = GenerationSettings(drafter="medusa", seed=0, max_new_tokens=60)
    drafter = engine.drafter(asked, TREE.head(4), True, grower)
    first, *steps, _ = engine.generate(PROMPT, drafter, asked)
    counted = [step for step in steps if step.index % ASKED_EVERY == ASKED_EVERY - 1]
    assert len(counted) > 4 and all(len(s.draft.guesses) == CANDIDATES.depth for s in counted)
    tally = AcceptanceCounts()
    assert tally.add_answer(first, steps, 3) and tally.steps == len(counted)
    assert {count[1] for count in tally.whole.ranks.values()} == {len(counted)}
    assert not tally.by_nodes
    drafter = engine.drafter(asked, TREE.head(4), False, grower)
    *_, plain = engine.generate(PROMPT, drafter, asked, False)
    assert plain.token_ids == tuple(t for e in (first, *steps) for t in e.token_ids)


def test_a_gate_that_is_shut_first_says_what_the_first_head_guessed(library):
    """The other heads' places were never written then: nothing of a shortlist is read by them."""
    engine = shortened("llama", library)
    room = engine.heads.twin._room_for

    def poisoned(*sizes):
        made = room(*sizes)
        made[-1].fill_(2**40)
        return made

    engine.heads.twin._room_for = poisoned
    steps, said = governed(engine, Always(0.999))
    shut = [step for step in steps if step.index % ASKED_EVERY != ASKED_EVERY - 1]
    assert {len(step.draft.guesses) for step in shut} == {1}
    assert {step.nodes for step in shut} == {1}
    engine.forget()
    assert list(said) == list(tokens(engine))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("size", [1, 2, 5, 8, 1003])
def test_how_certain_the_next_token_is(library, size, temperature):
    judge = NativeVerifier(native.NativeThreads(library, 1))
    torch.manual_seed(size)
    for spread in (0.5, 3.0, 12.0):
        row = torch.randn(size) * spread
        shares = torch.softmax(row / temperature, -1)
        for token in {int(row.argmax()), 0, size - 1, size // 2}:
            rival = max([float(p) for i, p in enumerate(shares) if i != token], default=0.0)
            wanted = float(shares[token]) / (float(shares[token]) + rival or 1.0)
            for one in (judge, TORCH):
                found = one.certainty(row, token, temperature)
                assert found == pytest.approx(wanted, rel=1e-4, abs=1e-6)


@given(st.integers(0, 10_000))
def test_the_c_twin_of_the_account_decides_the_same(library, seed):
    dice = random.Random(seed)
    costs = costs_of(dice.random() / 2, dice.random() / 1000)
    ours, theirs = (Grower(costs, EXPECTED[:4], CANDIDATES) for _ in range(2))
    theirs.balance = ours.balance = dice.choice([math.inf, 0.0, 0.5])
    account, length = NativeAccount(), dice.randint(1, 400)
    library.allow.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_double]
    library.book.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64]
    ours.begin(), theirs.begin()
    certainty = 1.0
    for number in range(60):
        asks = dice.random() < 0.1
        job = GrowthJob()
        account.open(theirs, length, asks)
        places = ctypes.addressof(account.job), ctypes.addressof(job)
        is_allowed = library.allow(*places, length, certainty)
        growth = ours.growth(length, certainty, asks)
        assert bool(is_allowed) == (growth is not None)
        tokens = 1
        if growth is not None:
            assert (job.most, job.rate, job.gate) == (growth.most, growth.rate, growth.gate)
            assert (ctypes.c_double * len(growth.seconds)).from_address(job.seconds)[:] == list(
                growth.seconds
            )
            nodes, tokens = dice.randint(1, growth.most), dice.randint(1, 3)
            ours.record(nodes, tokens)
            library.book(places[0], nodes, tokens)
        account.close(theirs)
        length += tokens
        certainty = dice.random() ** 0.2
        for name in ("balance", "credit", "pace", "certain_roots", "length"):
            assert getattr(ours, name) == getattr(theirs, name), name
        if number % 20 == 19:
            ours.begin(), theirs.begin()


class Counted:
    """How often an engine calls C for steps."""

    def __init__(self, engine):
        self.calls, self._team = 0, engine.backbone.whole_step._team

    def __enter__(self):
        self._steps, self._team.steps = self._team.steps, self.steps

    def steps(self, job):
        self.calls += 1
        return self._steps(job)

    def __exit__(self, *_):
        self._team.steps = self._steps


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_steps_in_one_call_are_those_of_a_call_each(library, temperature):
    """An account that is rich and poor, sure and not, as it goes."""
    engine = native_engine("llama", library, 2)
    plain = tokens(engine, temperature=temperature)
    engine.eos = engine.pauses = frozenset({max(set(plain), key=plain.index)})
    found, counts = [], []
    for is_lasting in (True, False):
        engine.forget()
        grower = Grower(costs_of(0.25), EXPECTED[:4], CANDIDATES)
        grower.certain = 0.05
        asked = GenerationSettings(
            drafter="medusa", seed=11, max_new_tokens=60, temperature=temperature
        )
        drafter, team = engine.drafter(asked, TREE.head(4), False, grower), Counted(engine)
        plan = drafter.plan
        drafter.plan = lambda *a, plan=plan, one=is_lasting: replace(plan(*a), is_lasting=one)
        with team:
            events = list(engine.generate(PROMPT, drafter, asked, False))
        made = [(e.path, e.token_ids, e.nodes) for e in events if isinstance(e, Step)]
        state = grower.balance, grower.credit, grower.pace, grower.certain_roots, grower.length
        found.append((made, events[-1].token_ids, events[-1].reason, state, list(engine._ids)))
        counts.append((team.calls, len(made)))
    assert found[0] == found[1]
    (few, steps), (each, _) = counts
    assert each == steps and few <= steps / 5


# Never slower than plain decoding.


def spend(grower: Grower, texts, length: int = 100):
    """(cost of the steps, cost of plain decoding, nodes) of an answer; 0 nodes: no head was asked.
    texts: of each step the root's probability, what every head is sure of, and the tokens that
    come where enough is drafted."""
    spent = plain = 0.0
    sizes = []
    tree = grower.candidates
    grower.begin()
    for certainty, sure, wanted in texts:
        growth, tokens = grower.growth(length, certainty), 1
        sizes.append(0 if growth is None else 1)
        if growth is not None:
            shares = [math.nan] + [sure] * (len(tree) - 1)
            nodes = (0,) if sure < growth.gate else grow(tree, shares, growth)
            tokens = min(wanted, subtree(tree, nodes).depth + 1)
            grower.record(len(nodes), tokens)
            spent += growth.seconds[len(nodes) - 1]
            sizes[-1] = len(nodes)
        else:
            spent += grower.costs.at(1, length)
        plain += tokens * grower.costs.at(1, length)
        length += tokens
    return spent, plain, sizes


STEPS = st.tuples(st.floats(0, 1), st.floats(0, 1), st.integers(1, 4))


@given(
    st.floats(0.0, 2.0),
    st.floats(0.0, 0.001),
    st.integers(1, 3000),
    st.lists(st.lists(STEPS, min_size=1, max_size=60), min_size=1, max_size=8),
)
def test_no_text_makes_the_steps_dearer_than_plain_decoding_and_a_fixed_sum(
    per_node, per_token, length, answers
):
    costs = costs_of(per_node, per_token)
    grower = Grower(costs, EXPECTED[:8], TREE.head(16))
    found = [spend(grower, texts, length) for texts in answers]
    spent, plain = sum(f[0] for f in found), sum(f[1] for f in found)
    overhead = max(costs.at(8, n) - costs.at(1, n) for n in costs.lengths)
    count = sum(map(len, answers))
    slack = 1e-3 * plain + per_token * 64 * 64 * count  # costs are looked up every 64 tokens
    assert spent <= (1 + growing.SHARE) * plain + growing.PATIENCE * overhead + slack


def grower_of(per_node: float, usual: int = 4) -> Grower:
    """One that has tried what was promised, and has nothing left."""
    made = Grower(costs_of(per_node), EXPECTED[:usual], TREE.head(2 * usual))
    made.balance = 0.0
    return made


@pytest.mark.parametrize("count", [5, 12, 200])
@pytest.mark.parametrize("certainty", [0.3, 0.7, 1.0])
def test_a_text_that_no_head_foresees_is_plain_decodings_from_its_first_step(count, certainty):
    grower = grower_of(0.25)
    for _ in range(5):
        spent, plain, sizes = spend(grower, [(certainty, 0.5, 1)] * count)
        assert max(sizes) <= 1 and plain / spent > 0.97
    assert spend(grower, [(0.5, 0.95, 4)] * count)[2] == [0] * count


def test_what_looks_sure_earns_what_is_then_spent_on_less():
    grower = grower_of(0.25)
    proof = growing.PROOF
    *_, sizes = spend(grower, [(1.0, 0.95, 4)] * (proof + 1) + [(0.5, 0.6, 4)] * 20)
    assert sizes[: proof - 1] == [0] * (proof - 1), "one certain root is no proof"
    assert sizes[proof - 1] > 2 and min(sizes[proof + 1 :]) > 1
    *_, sizes = spend(grower, [(0.5, 0.6, 1)] * 40)
    assert sizes[0] > 1, "a rich answer lets the next begin freely"
    assert sum(size > 1 for size in sizes) <= growing.CARRIED and sizes[20:] == [0] * 20
    *_, sizes = spend(grower, [(0.5, 0.6, 4)] * 10)
    assert sizes == [0] * 10, "and a poor one does not"


def test_heads_that_are_sure_and_wrong_cost_little_for_ever():
    grower = grower_of(0.25)
    spent, plain, sizes = spend(grower, [(1.0, 0.9, 1)] * 600)
    assert plain / spent > 0.97 and sizes[growing.PROOF - 1] > 1
    assert sizes[100:].count(0) > 0.9 * 500 and max(sizes[100:]) > 1


def test_drafting_that_costs_nothing_is_never_refused():
    costs = StepCosts((1, 4, 8), (100,), ((1.0, 0.99, 1.2),))
    grower = Grower(costs, EXPECTED[:4], TREE.head(8))
    for _ in range(3):
        *_, sizes = spend(grower, [(0.5, 0.6, 4)] * 6)
        assert min(sizes) > 1


def test_what_is_carried_is_reckoned_where_the_next_answer_begins():
    grower = Grower(costs_of(0.05, 0.0002), EXPECTED[:4], TREE.head(8))
    spend(grower, [(1.0, 0.95, 4)] * 40, 1100)
    *_, sizes = spend(grower, [(0.5, 0.6, 1)] * 60, 100)
    assert 1 <= sum(size > 1 for size in sizes) <= growing.CARRIED


def test_the_first_answer_may_try_what_was_promised():
    grower = Grower(costs_of(0.25), EXPECTED[:4], TREE.head(8))
    *_, sizes = spend(grower, [(0.5, 0.6, 1)] * 40)
    assert sizes[:3] == [4, 4, 4] and sizes[4:] == [0] * 36


def test_a_step_that_asks_has_the_usual_tree_whatever_is_known():
    grower = grower_of(0.25)
    spend(grower, [(1.0, 0.9, 1)] * 100)
    grower.begin()
    found = grower.growth(100, 0.1, asks=True)
    assert (found.most, found.rate, found.gate) == (4, 0.0, 0.0)
    assert grower.growth(101, 0.1) is None


def test_an_answer_without_a_draft_says_nothing_of_the_next():
    grower = grower_of(0.25)
    spend(grower, [(1.0, 0.95, 4)] * 40)
    for _ in range(3):  # refused, cancelled at once, of one token
        grower.begin()
    *_, sizes = spend(grower, [(0.5, 0.6, 4)] * 6)
    assert min(sizes) > 1


def test_a_step_that_was_drafted_is_never_priced_below_plain_decoding():
    for per_node in (0.0, 0.02, 1.5):
        costs = replace(costs_of(per_node), drafting=tuple(0.01 * n for n in SIZES))
        found = costs.drafted(4, 20, 100)
        assert len(found) == 20 and list(found) == sorted(found)
        assert costs.at(1, 100) <= found[0] <= costs.at(1, 100) + 0.04
        assert found[3] == pytest.approx(costs.at(4, 100))
        assert found[7] == pytest.approx(costs.at(8, 100))
    with pytest.raises(ValueError, match="time per size"):
        replace(costs, drafting=(0.1,))
    for odd in (math.nan, -5.0, math.inf):
        with pytest.raises(ValueError, match="time per size"):
            replace(costs, drafting=(odd,) * len(SIZES))
