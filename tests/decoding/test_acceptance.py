"""Acceptance rules against slow literal versions of their formulas."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.drafts import CPU, draft_of
from support.families import VOCABULARY, tiny
from transformers import MinPLogitsWarper

from medusa_chat.decoding.acceptance import (
    VerifyInput,
    entropies,
    exact,
    filtered,
    gumbel,
    own_tokens,
    scaled,
    thresholds,
    typical,
    typical_sampled,
)
from medusa_chat.decoding.draft import Draft, TreeTensors
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step import StepResult, read
from medusa_chat.decoding.tree import Tree
from medusa_chat.trees.shapes import cartesian, chain

TREE = Tree.from_choices([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (1, 0, 0), (1, 0, 1)])


def result(rule, draft, logits, place, settings) -> StepResult:
    return read(draft, rule(VerifyInput(draft, logits, place, settings, True)))


def literal_typical(tree, tokens, logits, settings) -> tuple[list[int], int]:
    """Section 2.3.1 word for word: the longest accepted prefix over all candidates; ties by the
    sum of log p, then the lowest node. The next token is greedy."""

    def p(node):
        row = [x / settings.temperature for x in logits[node].tolist()]
        top = max(row)
        exps = [math.exp(x - top) for x in row]
        return [e / sum(exps) for e in exps]

    best = ((1, 0.0, 0), [0])
    for node in range(1, len(tree)):
        total, ok = 0.0, True
        for child in tree.paths[node][1:]:
            row = p(tree.parents[child])
            entropy = -sum(x * math.log(x) for x in row if x > 0)
            limit = min(settings.posterior_threshold, settings.posterior_alpha * math.exp(-entropy))
            ok = ok and row[tokens[child]] > limit
            total += math.log(row[tokens[child]])
        path = list(tree.paths[node])
        if ok and (len(path), total, -node) > best[0]:
            best = ((len(path), total, -node), path)
    path = best[1]
    return path, max(range(logits.shape[1]), key=lambda i: (float(logits[path[-1], i]), -i))


@given(
    seed=st.integers(0, 10_000),
    temperature=st.sampled_from([0.3, 0.7, 1.0, 1.6]),
    epsilon=st.sampled_from([0.01, 0.09, 0.25, 0.9]),
    alpha=st.sampled_from([0.1, 0.3, 0.5, 0.95]),
    scale=st.sampled_from([0.5, 2.0, 6.0]),
)
def test_typical_equals_its_formula(seed, temperature, epsilon, alpha, scale):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(TREE), 7, generator=generator, dtype=torch.float64) * scale
    orders = torch.rand(len(TREE), 7, generator=generator).argsort(-1)  # siblings are different
    places = zip(TREE.parents[1:], TREE.ranks[1:], strict=True)
    tokens = [1, *(int(orders[parent, rank]) for parent, rank in places)]
    settings = GenerationSettings(
        temperature=temperature, posterior_threshold=epsilon, posterior_alpha=alpha, seed=seed
    )
    path, next_token = literal_typical(TREE, tokens, logits, settings)
    draft = draft_of(TREE, tokens)
    got = result(typical, draft, logits, 3, settings)
    assert (got.path, got.next_token) == (path, next_token)
    sampled = result(typical_sampled, draft, logits, 3, settings)
    assert sampled.path == got.path
    log_p = torch.log_softmax(logits[path[-1]] / temperature, -1)
    limit = thresholds(entropies(log_p[None].float()), settings)
    assert float(log_p[sampled.next_token].exp()) > float(limit) - 1e-6


def test_the_most_probable_token_always_passes_below_delta_one():
    log_p = torch.log_softmax(torch.randn(20_000, 50) * torch.rand(20_000, 1) * 8, -1)
    settings = GenerationSettings(posterior_threshold=1.0, posterior_alpha=0.999)
    assert (log_p.max(-1).values.exp() > thresholds(entropies(log_p), settings)).all()


@pytest.mark.parametrize("temperature", [0.0, 9e-4])
@pytest.mark.parametrize("rule", [typical, typical_sampled])
def test_at_temperature_zero_or_as_good_as_none_every_rule_is_greedy(rule, temperature):
    logits = torch.randn(len(TREE), 7, generator=torch.Generator().manual_seed(0))
    tokens = [1, *logits.argmax(-1)[list(TREE.parents[1:])].tolist()]
    settings, zero = (GenerationSettings(temperature=t, seed=1) for t in (temperature, 0.0))
    draft = draft_of(TREE, tokens)
    a, b = (result(r, draft, logits, 0, s) for r, s in ((rule, settings), (exact, zero)))
    assert (a.path, a.next_token, a.record.entropies) == (b.path, b.next_token, b.record.entropies)


@pytest.mark.parametrize("rule", [typical, typical_sampled])
def test_at_temperature_zero_a_likely_second_token_is_refused(rule):
    logits = torch.tensor([[1.0, 0.9, 0.0], [1.0, 0.9, 0.0]])
    got = result(rule, draft_of(chain(1), [0, 1]), logits, 0, GenerationSettings(seed=1))
    assert (got.path, got.next_token) == ([0], 0)


def test_impossible_tokens_add_no_entropy():
    log_p = torch.log_softmax(torch.tensor([[0.0, 0.0, -torch.inf]]), -1)
    assert float(entropies(log_p)) == pytest.approx(math.log(2))


def test_typical_does_not_depend_on_the_seed():
    logits = torch.randn(len(TREE), 7, generator=torch.Generator().manual_seed(4))
    draft = draft_of(TREE, [1, 2, 3, 4, 5, 6, 0, 1, 2])
    settings = (GenerationSettings(temperature=1.0, seed=seed) for seed in range(20))
    results = [result(typical, draft, logits, 0, one) for one in settings]
    found = {(tuple(one.path), one.next_token) for one in results}
    assert len(found) == 1


def test_ties_take_the_lowest_node_and_token():
    tree = cartesian(2)
    logits = torch.zeros(3, 5)
    settings = GenerationSettings(temperature=1.0, seed=0)
    got = result(typical, draft_of(tree, [0, 3, 4]), logits, 0, settings)
    assert got.path == [0, 1] and got.next_token == 0


@pytest.mark.parametrize("rule", [typical, typical_sampled])
def test_nothing_but_epsilon_and_delta_filters_what_is_typical(rule):
    logits = 2 * torch.randn(len(TREE), 7, generator=torch.Generator().manual_seed(6))
    draft = draft_of(TREE, [1, 2, 3, 4, 5, 6, 0, 1, 2])
    for seed in range(20):
        plain = GenerationSettings(temperature=1.0, seed=seed, posterior_alpha=0.1)
        cut = replace(plain, top_k=1, top_p=0.1, min_p=1.0)
        one, other = (result(rule, draft, logits, 0, settings) for settings in (plain, cut))
        assert (one.path, one.next_token) == (other.path, other.next_token)


def samples(settings_of, logits, count):
    """`count` draws for one row of logits, 200 places at a time, a seed for each time."""
    tensors = TreeTensors.of(chain(199), CPU)
    rows = logits.expand(200, -1)
    draft = Draft(torch.zeros(200), tensors)
    given = (VerifyInput(draft, rows, 0, settings_of(n), False) for n in range(count // 200))
    return torch.cat([own_tokens(one) for one in given])


@pytest.mark.parametrize("options", [{}, {"top_k": 4}, {"top_p": 0.9}, {"min_p": 0.05}])
@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.8])
def test_samples_have_the_models_distribution(options, temperature):
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0]])

    def settings_of(seed):
        return GenerationSettings(temperature=temperature, seed=seed, **options)

    drawn = samples(settings_of, logits, 20_000)
    expected = torch.softmax(filtered(logits / temperature, settings_of(0)), -1)[0]
    counts = torch.bincount(drawn, minlength=8).float()
    assert counts[expected == 0].sum() == 0
    kept = expected > 0
    assert chance(counts[kept], expected[kept] / expected[kept].sum() * 20_000) > 1e-4


def chance(counts, expected) -> float:
    """Of counts as far from the expected ones, or farther: Pearson's chi-square test."""
    assert math.isclose(counts.sum(), expected.sum(), rel_tol=1e-5)
    counts, expected = counts.double(), expected.double()
    statistic = ((counts - expected).square() / expected).sum()
    half = torch.tensor((len(counts) - 1) / 2, dtype=torch.double)
    return float(torch.special.gammaincc(half, statistic / 2))


def test_the_chance_is_that_of_the_tables():
    for counts, wanted in (((10, 10), 1.0), ((16, 4), 0.0072904), ((5, 9, 3, 15), 0.0147609)):
        counts = torch.tensor(counts).float()
        even = torch.full_like(counts, float(counts.mean()))
        assert chance(counts, even) == pytest.approx(wanted, rel=1e-4)


def test_the_chi_square_catches_a_broken_sampler():
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0]])
    drawn = samples(lambda seed: GenerationSettings(temperature=1.1, seed=seed), logits, 20_000)
    counts = torch.bincount(drawn, minlength=8).float()
    assert chance(counts, torch.softmax(logits, -1)[0] * 20_000) < 1e-4


def test_two_tokens_of_a_drafted_step_have_the_joint_distribution():
    """A root with two children: the pair (first, second) follows p(first) p(second | first)."""
    tree = cartesian(2)
    rows = torch.tensor([[1.0, 0.3, -0.2], [0.0, 1.2, 0.4], [0.9, -0.8, 0.1]])
    draft = draft_of(tree, [0, 0, 1])
    counts = torch.zeros(3, 3)
    for place in range(0, 8_000, 2):
        settings = GenerationSettings(temperature=1.0, seed=17)
        got = result(exact, draft, rows, place, settings)
        first = got.record.sampled[0]
        accepted = len(got.path) == 2
        assert accepted == (first in (0, 1))
        if accepted:
            counts[first, got.next_token] += 1
    p = torch.softmax(rows, -1)
    expected = (p[0, :2, None] * p[1:]).flatten()
    expected = expected / expected.sum() * counts.sum()
    assert chance(counts[:2].flatten(), expected) > 1e-4


def test_noise_depends_on_seed_position_and_token_alone():
    places = torch.arange(5, 25)
    whole = gumbel(123456789012345, places, 300)
    assert torch.equal(whole[3:4], gumbel(123456789012345, places[3:4], 300))
    assert not torch.equal(whole, gumbel(123456789012346, places, 300))
    assert not torch.equal(whole, gumbel(123456789012345 + (1 << 32), places, 300))
    assert torch.isfinite(whole).all()
    assert abs(float(whole.mean()) - 0.5772) < 0.05 and abs(float(whole.var()) - 1.6449) < 0.1
    neighbours = torch.corrcoef(torch.stack((whole[:-1].flatten(), whole[1:].flatten())))
    assert abs(float(neighbours[0, 1])) < 0.05


def test_top_p_keeps_the_smallest_set_and_always_one_token():
    scores = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]]))

    def kept(p):
        return int(torch.isfinite(filtered(scores, GenerationSettings(top_p=p))).sum())

    assert [kept(p) for p in (0.0, 0.4, 0.5, 0.6, 0.81, 0.99)] == [1, 1, 1, 2, 3, 4]


@pytest.mark.parametrize("spread", [0.5, 1.5, 4.0])
@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9, 0.99])
def test_top_p_of_many_tokens_is_of_all_of_them_in_each_row_alone(spread, top_p, monkeypatch):
    """Of the first so many most likely tokens it is what a stable sort of all of them leaves, at
    ties, too, and whatever a row beside it needs."""
    monkeypatch.setattr("medusa_chat.decoding.acceptance.LIKELY", (40, 400))
    generator = torch.Generator().manual_seed(int(10 * spread))
    scores = torch.randn(6, 5003, generator=generator) * spread
    scores[3:] = scores[3:].round()
    scores[5] = -torch.inf
    scores[5, 7:9] = 1.0
    settings = GenerationSettings(top_p=top_p)
    left = torch.isfinite(filtered(scores, settings))
    ordered, order = torch.sort(scores, dim=-1, descending=True, stable=True)
    share = ordered.double().softmax(-1)
    first = share.cumsum(-1) - share < top_p
    first[:, 0] = True
    assert torch.equal(left, torch.zeros_like(first).scatter(1, order, first) & scores.isfinite())
    alone = [torch.isfinite(filtered(row[None], settings)) for row in scores]
    assert torch.equal(torch.cat(alone), left)


def test_top_k_keeps_the_k_largest():
    scores = torch.tensor([[3.0, 1.0, 2.0, 0.0]])

    def kept(k):
        left = filtered(scores, GenerationSettings(top_k=k))[0]
        return torch.isfinite(left).nonzero()[:, 0].tolist()

    assert [kept(k) for k in (1, 2, 3)] == [[0], [0, 2], [0, 1, 2]]
    assert kept(0) == kept(4) == [0, 1, 2, 3]


def test_top_p_is_of_what_top_k_leaves():
    scores = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    left = filtered(scores, GenerationSettings(top_k=2, top_p=0.5))
    assert torch.isfinite(left)[0].tolist() == [True, False, False, False]  # 0.4 / 0.7 > 0.5


def test_min_p_is_a_share_of_the_most_likely_and_1_leaves_what_equals_it():
    scores = torch.log(torch.tensor([[0.05, 0.3, 0.15, 0.5], [0.4, 0.4, 0.1, 0.1]]))

    def kept(p):
        return torch.isfinite(filtered(scores, GenerationSettings(min_p=p))).sum(-1).tolist()

    assert [kept(p) for p in (0.09, 0.2, 0.5, 0.7, 1.0)] == [[4, 4], [3, 4], [2, 2], [1, 2], [1, 2]]
    assert filtered(scores, GenerationSettings(min_p=0.0)) is scores


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(
    "options",
    [
        *({"min_p": p} for p in (0.02, 0.1, 0.5, 1.0)),
        {"top_k": 9, "min_p": 0.1},
        {"top_p": 0.8, "min_p": 0.05},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02},
    ],
)
def test_filters_leave_the_tokens_and_the_order_of_transformers(options, temperature):
    """`generate` tells the logits and what its processors, in its own order, made of them."""
    ids = torch.randint(3, VOCABULARY, (64, 5), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(0)
    told = tiny("llama").generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=6,
        eos_token_id=None,
        do_sample=True,
        temperature=temperature,
        **{"top_k": 0, "top_p": 1.0} | options,
        output_logits=True,
        output_scores=True,
        return_dict_in_generate=True,
    )
    settings = GenerationSettings(temperature=temperature, **options)
    logits, wanted = torch.cat(told.logits), torch.cat(told.scores)
    ours = filtered(scaled(logits, settings), settings)
    assert torch.equal(ours.isfinite(), wanted.isfinite())
    assert torch.equal(ours.softmax(-1), wanted.softmax(-1))
    assert 0 < ours.isfinite().float().mean() < 1


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 1.0])
def test_min_p_of_a_large_vocabulary_leaves_the_tokens_of_transformers(min_p):
    generator = torch.Generator().manual_seed(7)
    for scale in (0.3, 3.0, 30.0):
        scores = scale * torch.randn(16, 49_152, generator=generator)
        ours = filtered(scores, GenerationSettings(min_p=min_p))
        assert torch.equal(ours, MinPLogitsWarper(min_p)(None, scores))
