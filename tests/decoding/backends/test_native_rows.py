"""What C reads from rows of logits is what torch reads: the same tokens, sums to rounding."""

import pytest
import torch
from support.drafts import draft_of
from support.engines import TREES
from torch.utils._python_dispatch import TorchDispatchMode

from medusa_chat.decoding.acceptance import (
    TORCH,
    Rows,
    VerifyInput,
    exact,
    gumbel,
    typical,
    typical_sampled,
)
from medusa_chat.decoding.backends.native_library import NativeLibrary
from medusa_chat.decoding.backends.native_rows import NativeRows
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.trees.shapes import chain

aten = torch.ops.aten


@pytest.fixture
def asked(monkeypatch):
    """The places and seeds of the draws that torch was asked for."""
    found, real = [], Rows.draw
    monkeypatch.setattr(Rows, "draw", lambda self, *a: (found.append(a[3:]), real(self, *a))[1])
    return found


def given_of(logits, place=0, settings=None) -> VerifyInput:
    """Rows of logits as those of a chain's nodes, the first at this place in the text."""
    draft = draft_of(chain(len(logits) - 1), [0] * len(logits))
    return VerifyInput(draft, logits, place, GenerationSettings(**settings or {}), True)


# of 20,000 tokens there are more numbers than FEW: below that one thread works alone
@pytest.mark.parametrize(
    ("vocabulary", "threads"), [(7, 1), (48, 1), (1003, 1), (20_000, 1), (20_000, 3)]
)
def test_the_same_tokens_and_sums(library, vocabulary, threads):
    ours = NativeRows(NativeLibrary(library, threads))
    torch.manual_seed(3)
    depths = torch.tensor([2, 1, 0, 2, 1, 0])  # of rows whose noise another thread makes
    for scale in (0.1, 3.0, 40.0, 3000.0):
        scores = scale * torch.randn(len(depths), vocabulary)
        scores[0, 3] = scores[0, 5] = scores[0].max() + 1  # a tie
        assert torch.equal(ours.largest(scores), TORCH.largest(scores))
        assert ours.largest(scores)[0] == 3
        whole = given_of(scores)
        for mine, others in zip(ours.sums(whole), TORCH.sums(whole), strict=True):
            assert torch.allclose(mine, others, atol=1e-4, rtol=1e-5)
        for seed in (0, 7, 2**40 + 3):
            given = scores, depths, 2, 31, seed
            assert torch.equal(ours.draw(*given), TORCH.draw(*given))


@pytest.mark.parametrize("count", [0, 1, 20, 61])
def test_the_likeliest_tokens_and_their_sums_are_torchs(library, count):
    torch.manual_seed(6)
    logits = 3 * torch.randn(2, 61)
    mine, others = (
        rows.best(logits, count) for rows in (NativeRows(NativeLibrary(library, 2)), TORCH)
    )
    assert torch.equal(mine[0], others[0]) and torch.equal(mine[1], others[1])
    assert torch.allclose(mine[2], others[2])


def test_the_lowest_of_equals_wins_wherever_they_stand(library):
    scores = torch.zeros(1, 64)
    scores[0, 5] = scores[0, 11] = 1.0  # of vectors of 8 the second stands in a lower lane
    assert int(NativeRows(NativeLibrary(library, 1)).largest(scores)) == 5


def test_a_near_tie_is_torchs_to_decide(library, asked):
    """Two scores that differ, with their noise, in the last digit alone."""
    ours, depths = NativeRows(NativeLibrary(library, 1)), torch.tensor([0])
    noise = gumbel(9, torch.tensor([5]), 64)
    assert int(ours.draw(torch.zeros(1, 64), depths, 0, 5, 9)) == int(noise.argmax())
    assert not asked
    level = noise.max() - noise  # with it all are as large as the largest
    found = ours.draw(level, depths, 0, 5, 9)
    assert len(asked) == 1 and torch.equal(found, TORCH.draw(level, depths, 0, 5, 9))


# in the same lane of another vector, behind the last whole one, and as near as two large scores
# can be: a float32 near 20,000 has three digits behind the point
@pytest.mark.parametrize(("place", "high", "gap"), [(11, 0, 1e-6), (66, 0, 1e-6), (9, 2e4, 0.2)])
def test_a_near_tie_of_two_is_torchs_to_decide_wherever_they_stand(
    library, asked, place, high, gap
):
    noise = gumbel(9, torch.tensor([5]), 67)[0]
    scores = torch.full((1, 67), -2e4)
    scores[0, 3], scores[0, place] = high, high + noise[3] - noise[place] - gap
    NativeRows(NativeLibrary(library, 1)).draw(scores, torch.tensor([0]), 0, 5, 9)
    assert len(asked) == 1


def rows_of(kind, vocabulary, spread):
    """Scores [3, V] like those of models, and unlike any."""
    scores = spread * torch.randn(3, vocabulary)
    if kind == "ties":
        return (scores * 2).round() / 2
    if kind == "peaked":
        return scores**3 / spread**2
    if kind == "left out":
        scores[torch.rand(3, vocabulary) < 0.4] = -torch.inf
        scores[:, 1] = 1.0
    return scores


CUTS = (
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 3000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.95},
    {"top_p": 0.9999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 700, "top_p": 0.95, "min_p": 0.01},
)


@pytest.mark.parametrize("kind", ["usual", "peaked", "ties", "left out"])
@pytest.mark.parametrize("vocabulary", [3, 64, 5003, 20_000])
def test_samples_are_torchs_whatever_is_left_out(library, kind, vocabulary):
    ours = NativeRows(NativeLibrary(library, 2))
    torch.manual_seed(vocabulary)
    for number, spread in enumerate((0.02, 2.5, 40.0)):
        for cut in CUTS:
            scores = rows_of(kind, vocabulary, spread)
            chosen = {"temperature": (0.1, 0.7, 1.7)[number], "seed": 2**40 + number, **cut}
            given = given_of(scores, 100 + number, chosen)
            assert torch.equal(ours.sample(given), TORCH.sample(given))


def test_torch_is_seldom_asked(library, asked):
    ours = NativeRows(NativeLibrary(library, 1))
    torch.manual_seed(8)
    scores = 2.5 * torch.randn(1, 5000)
    chosen = {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "seed": 5}
    for place in range(1000):
        ours.sample(given_of(scores, place, chosen))
    assert len(asked) < 10


def test_where_top_p_ends_is_torchs_to_decide(library, asked):
    """The third token begins where the share of 0.8 is reached, but for rounding."""
    ours = NativeRows(NativeLibrary(library, 1))
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))
    chosen = {"temperature": 1.0, "top_p": 0.8, "seed": 5}
    rows = [given_of(scores, place, chosen) for place in range(60)]
    drawn = [ours.sample(given) for given in rows]
    assert 2 < len(asked) < 30  # where the third one is the largest with its noise
    assert drawn == [TORCH.sample(given) for given in rows]


class WholeRows(TorchDispatchMode):
    """The operators of torch that were given or gave as many numbers as a row has."""

    def __init__(self, size):
        super().__init__()
        self.size, self.found = size, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **kwargs or {})
        is_few = function in (aten.gather.default, aten.index.Tensor, aten.empty.memory_format)
        tensors = [t for t in (*args, result) if isinstance(t, torch.Tensor)]
        if not is_few and any(t.numel() >= self.size for t in tensors):
            self.found.append(str(function))
        return result


@pytest.mark.parametrize("rule", [exact, typical])
@pytest.mark.parametrize("cut", [{}, {"top_k": 9}, {"top_p": 0.8}, {"min_p": 0.1}])
def test_no_operator_of_torch_reads_a_whole_row(library, rule, cut):
    """Its threads go on spinning after one, where the next pass wants the cores."""
    ours, tree = NativeRows(NativeLibrary(library, 1)), next(iter(TREES.values()))
    torch.manual_seed(2)
    logits = 3 * torch.randn(len(tree), 5000)
    draft = draft_of(tree, torch.randint(6, (len(tree),)).tolist())
    for temperature in (0.0, 0.7):
        chosen = GenerationSettings(temperature=temperature, seed=3, **cut)
        with WholeRows(logits.shape[1]) as whole:
            rule(VerifyInput(draft, logits, 3, chosen, True, ours))
        assert not whole.found


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_of_different_texts_are_drawn_as_each_alone(library, threads):
    ours = NativeRows(NativeLibrary(library, threads))
    torch.manual_seed(5)
    places = torch.tensor([4, 900, -1, 4, 0])
    seeds = torch.tensor([7, 2**40 + 3, 7, 8, 2**63 - 1])
    zero = torch.tensor([0])
    for scale in (0.1, 3.0, 40.0):
        scores = scale * torch.randn(len(places), 20_000)
        found = ours.draw_each(scores, places, seeds)
        for row, (place, seed) in enumerate(zip(places.tolist(), seeds.tolist(), strict=True)):
            one = scores[row : row + 1]
            alone = TORCH.largest(one) if place < 0 else TORCH.draw(one, zero, 0, place, seed)
            assert found[row] == alone[0]


def test_a_near_tie_of_one_text_is_torchs_to_decide(library, asked):
    ours = NativeRows(NativeLibrary(library, 1))
    noise = gumbel(9, torch.tensor([5]), 64)
    scores = torch.cat((torch.zeros(1, 64), noise.max() - noise, torch.zeros(1, 64)))
    places, seeds = torch.tensor([3, 5, -1]), torch.tensor([2, 9, 9])
    found = ours.draw_each(scores, places, seeds)
    assert asked == [(5, 9)]
    assert found[1] == TORCH.draw(scores[1:2], torch.tensor([0]), 0, 5, 9)[0] and found[2] == 0


@pytest.mark.parametrize("rule", [exact, typical, typical_sampled])
def test_every_rule_has_the_same_outcome(library, rule):
    ours, tree = NativeRows(NativeLibrary(library, 1)), next(iter(TREES.values()))
    torch.manual_seed(4)
    for number in range(40):
        draft = draft_of(tree, torch.randint(6, (len(tree),)).tolist())
        logits = 2 * torch.randn(len(tree), 61)
        cut = ({"top_k": 9}, {"top_p": 0.8}, {}, {"min_p": 0.2}, {"top_k": 9, "min_p": 0.1})
        chosen = {"temperature": (number % 4) / 2, "seed": number} | cut[number % 5]
        settings = GenerationSettings(**chosen)
        mine, others = (
            rule(VerifyInput(draft, logits, 3, settings, True, rows)) for rows in (ours, TORCH)
        )
        for name in ("node", "sampled"):
            assert torch.equal(getattr(mine, name), getattr(others, name))
        for name in ("log_probabilities", "checks"):
            pair = (getattr(one, name) for one in (mine, others))
            assert torch.allclose(*pair, atol=1e-4)


def test_sums_hold_over_the_range_of_logits(library):
    ours = NativeRows(NativeLibrary(library, 1))
    scores = torch.tensor([[0.0, -1e4, -50.0, -float("inf")], [80.0, 80.0, -80.0, 3.0]])
    sums, entropy = ours.sums(given_of(scores))
    assert sums.tolist() == pytest.approx([0.0, 80.6931472])
    assert entropy.tolist() == pytest.approx([0.0, 0.6931472], abs=1e-5)
