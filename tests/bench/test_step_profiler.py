"""The profiler of whole steps, for `bench` and the GPU script. Every clock and cost is made up."""

import random
from itertools import groupby

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.step_costs import TREE, costs_of

from medusa_chat.bench.step_costs import StepCosts
from medusa_chat.bench.step_profiler import SIZES, SLOW, time_steps, warm_ups
from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.trees.shapes import chain

BRIEF = 0.03  # seconds of a clock on which a plain step takes 0.001: the fewest rounds


def loaded_from(folder):
    return list(load(LoadRequest(str(folder), precision="fp32", device="cpu")))[-1][1]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return loaded_from(write_checkpoint(tmp_path_factory.mktemp("timed") / "model"))


class Clock:
    """Time that passes only while a step is rehearsed, as much as the made-up costs say."""

    def __init__(self, monkeypatch, costs: StepCosts) -> None:
        from medusa_chat.bench.step_profiler import StepProfiler

        self.now, self.steps, real = 0.0, [], StepProfiler.step

        def step(stage, nodes, length):
            self.steps.append((nodes, length))
            self.now += costs.at(nodes, length) / 1000
            real(stage, nodes, length)
            return 0.1e-3 * (nodes > 1)  # of it the heads'

        monkeypatch.setattr(StepProfiler, "step", step)

    def __call__(self) -> float:
        return self.now


def test_measuring_finds_the_costs_and_takes_about_the_budget(monkeypatch, loaded):
    costs = costs_of(0.04)
    clock = Clock(monkeypatch, costs)
    *waits, found = time_steps(loaded.engine, TREE, 0.15, clock)
    warm = len(found.sizes)
    rounds = (len(waits) - warm) / warm
    each = [1 + warm_ups(costs.at(nodes, 128) / 1000) for nodes in found.sizes]
    assert not any(waits) and len(clock.steps) == warm + rounds * sum(each)
    for length in found.lengths:
        for nodes in found.sizes:
            assert found.overhead(nodes, length) == pytest.approx(costs.overhead(nodes, length))
    assert found.sizes == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert 0.15 <= clock.now < 1.0


def test_steps_that_other_work_disturbed_do_not_count(monkeypatch, loaded):
    """Two of three take up to nine times as long, as where others want the same cores."""
    from medusa_chat.bench.step_profiler import StepProfiler

    costs, dice = costs_of(0.04), random.Random(3)
    clock = Clock(monkeypatch, costs)
    calm = StepProfiler.step

    def disturbed(stage, nodes, length):
        found = calm(stage, nodes, length)
        if dice.random() < 2 / 3:
            clock.now += costs.at(nodes, length) / 1000 * dice.uniform(1, 8)
        return found

    monkeypatch.setattr(StepProfiler, "step", disturbed)
    *_, found = time_steps(loaded.engine, TREE, 4.0, clock)
    for nodes in found.sizes:
        assert found.overhead(nodes, 128) == pytest.approx(costs.overhead(nodes, 128))


def test_one_disturbed_look_at_a_size_leaves_it_in(monkeypatch, loaded):
    """The first step of every size takes thirty times as long: a size is not judged by it."""
    from medusa_chat.bench.step_profiler import StepProfiler

    costs, seen = costs_of(0.04), set()
    clock = Clock(monkeypatch, costs)
    calm = StepProfiler.step

    def disturbed(stage, nodes, length):
        found = calm(stage, nodes, length)
        if nodes > 1 and nodes not in seen:
            clock.now += 30 * costs.at(nodes, length) / 1000
        seen.add(nodes)
        return found

    monkeypatch.setattr(StepProfiler, "step", disturbed)
    *_, found = time_steps(loaded.engine, TREE, 1.0, clock)
    assert found.sizes == tuple(m for m in SIZES if m <= len(TREE))


def test_measuring_is_interleaved_and_each_size_is_measured_equally_often(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(0.01))
    found = list(time_steps(loaded.engine, TREE, 2 * BRIEF, clock))[-1]
    timed = clock.steps[len(found.sizes) :]
    rounds = [kind for kind, _ in groupby(timed)]  # each follows its own kind
    per_round = len(found.sizes) * len(found.lengths)
    assert len(rounds) >= 2 * per_round and len(rounds) % per_round == 0
    for start in range(0, len(rounds), per_round):
        assert len(set(rounds[start : start + per_round])) == per_round


def test_slow_steps_end_the_measurement_early(monkeypatch, loaded):
    slow = StepCosts(SIZES, (100,), (tuple(1000.0 + n for n in SIZES),))  # a second a step
    clock = Clock(monkeypatch, slow)
    found = list(time_steps(loaded.engine, TREE, 1.0, clock))[-1]
    assert clock.now < 3 * SLOW * len(found.lengths)


def test_a_size_that_can_never_pay_is_not_measured_again(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(1.0))  # 4 nodes cost 4 steps, the tree is 3 deep
    found = list(time_steps(loaded.engine, TREE, BRIEF, clock))[-1]
    assert max(found.sizes) <= 4


@pytest.mark.parametrize("stop_after", [0, 1, 7, None])
def test_measuring_leaves_the_conversation_as_it_was(monkeypatch, loaded, stop_after):
    """Stopped anywhere, or run to its end: the next turn reuses the cache and says the same."""
    engine = loaded.engine
    settings = GenerationSettings(drafter="none", max_new_tokens=24, seed=1, nodes=1)
    text = [7 * i % 250 for i in range(200)]
    plain = engine.drafter(settings, TREE.head(1))
    answer = list(engine.generate(text, plain, settings))[-1].token_ids
    longer = [*text, *answer]
    before = [block.clone() for block in engine.backbone.cache._blocks]
    held, ids = engine.backbone.cache.length, list(engine._ids)
    steps = time_steps(engine, TREE, BRIEF, Clock(monkeypatch, costs_of(0.01)))
    for number, _ in enumerate(steps):
        if number == stop_after:
            break
    steps.close()
    assert engine.backbone.cache.length == held and engine._ids == ids
    for old, new in zip(before, engine.backbone.cache._blocks, strict=True):
        assert torch.equal(old[:, :, :, :held], new[:, :, :, :held])
    events = list(engine.generate(longer, engine.drafter(settings, TREE.head(1)), settings))
    assert events[0].reused_tokens >= len(longer) - 2
    engine.forget()
    again = list(engine.generate(longer, engine.drafter(settings, TREE.head(1)), settings))
    assert events[-1].token_ids == again[-1].token_ids


def test_without_heads_chains_of_the_text_are_timed(tmp_path):
    """Real steps: of each size, and at the end the cache as it was."""
    bare = loaded_from(write_checkpoint(tmp_path / "model", heads=0))
    held = bare.engine.backbone.cache.length
    *_, found = time_steps(bare.engine, chain(15), BRIEF)
    assert found.sizes[:3] == (1, 2, 4) and found.sizes[-1] <= 16
    assert bare.engine.backbone.cache.length == held


def test_costs_meet_what_was_measured_and_lie_between_it():
    costs = costs_of(0.1, per_token=0.001)
    for row, length in zip(costs.seconds, costs.lengths, strict=True):
        for value, nodes in zip(row, costs.sizes, strict=True):
            assert costs.at(nodes, length) == pytest.approx(value)
    assert costs.at(6, 600) == pytest.approx((costs.at(4, 600) + costs.at(8, 600)) / 2)
    assert costs.at(16, 2100) > costs.at(16, 1100) > costs.at(16, 100)
    assert costs.at(16, 3) == costs.at(16, 100)


@pytest.mark.parametrize(
    "sizes, lengths, seconds",
    [
        ((4,), (1,), ((1.0,),)),
        ((1, 4, 4), (1,), ((1.0, 1.0, 1.0),)),
        ((1, 4), (2, 1), ((1.0, 2.0), (1.0, 2.0))),
        ((1, 4), (1,), ((1.0,),)),
        ((1, 4), (1,), ((1.0, 0.0),)),
        ((1, 4), (1,), ((1.0, float("nan")),)),
    ],
)
def test_costs_that_make_no_sense_are_refused(sizes, lengths, seconds):
    with pytest.raises(ValueError):
        StepCosts(sizes, lengths, seconds)
