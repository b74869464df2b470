"""The tuner and what is kept of it. Every clock and every cost here is made up."""

import json
import random
import threading
from dataclasses import replace
from itertools import groupby

import pytest
import torch
from support.checkpoints import write_checkpoint
from support.step_costs import EXPECTED, TREE, costs_of
from support.waiting import wait_for

from medusa_chat.checkpoints.load import load
from medusa_chat.cli.doctor import examine
from medusa_chat.decoding.draft_budget import DraftBudget
from medusa_chat.decoding.events import Step
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.step_costs import StepCosts
from medusa_chat.errors import UsageError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import session as sessions
from medusa_chat.runtime import tuner
from medusa_chat.runtime.reply import reply, resolve
from medusa_chat.runtime.requests import Reply, Tune
from medusa_chat.runtime.session import Session
from medusa_chat.runtime.step_profiler import SIZES, SLOW, time_steps, warm_ups
from medusa_chat.runtime.tuner import tune, tune_unless_known
from medusa_chat.trees import tuning_store
from medusa_chat.trees.auto_tree import auto_tree, candidates, expected_tokens, source_tree
from medusa_chat.trees.pick import pick

CPU = torch.device("cpu")
BRIEF = 0.03  # seconds of a clock on which a plain step takes 0.001: the fewest rounds
PLACE = tuning_store.TuningKey("demo", "", "fp32", "a CPU, 2 threads", "torch 2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("tuned") / "model")


@pytest.fixture(scope="module")
def shared(folder):
    return loaded_from(folder)


def loaded_from(folder):
    return list(load(LoadRequest(str(folder), precision="fp32", device="cpu")))[-1][1]


@pytest.fixture
def loaded(shared):
    """The model as just loaded, with nothing tuned."""
    shared.tuned = None
    shared.budgets.clear()
    shared.trees.clear()
    shared.engine.forget()
    shared.said = None
    return shared


class Clock:
    """Time that passes only while a step is rehearsed, as much as the made-up costs say."""

    def __init__(self, monkeypatch, costs: StepCosts) -> None:
        from medusa_chat.runtime.step_profiler import StepProfiler

        self.now, self.steps, real = 0.0, [], StepProfiler.step

        def step(stage, nodes, length):
            self.steps.append((nodes, length))
            self.now += costs.at(nodes, length) / 1000
            real(stage, nodes, length)
            return 0.1e-3 * (nodes > 1)  # of it the heads'

        monkeypatch.setattr(StepProfiler, "step", step)

    def __call__(self) -> float:
        return self.now


# Measuring.


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
    assert found.sizes == (1, 4, 8, 16, 24, 32, 48, 64)
    assert 0.15 <= clock.now < 1.0


def test_steps_that_other_work_disturbed_do_not_count(monkeypatch, loaded):
    """Two of three take up to nine times as long, as where others want the same cores."""
    from medusa_chat.runtime.step_profiler import StepProfiler

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
    from medusa_chat.runtime.step_profiler import StepProfiler

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


def test_a_step_drafts_from_twice_the_nodes_that_pay_on_average():
    cpu = torch.device("cpu")
    found = {n: candidates(None, 4, cpu, source_tree(None, 4).head(n)) for n in (4, 8)}
    assert len(found[4]) == 8 and len(found[8]) == 16
    assert candidates(None, 4, cpu, source_tree(None, 4).head(1)) is None


def test_measuring_is_interleaved_and_each_size_is_measured_equally_often(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(0.01))
    found = list(time_steps(loaded.engine, TREE, BRIEF, clock))[-1]
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
    assert pick(found, EXPECTED, 100).nodes == 1


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


# What --tree auto makes of it.


def test_auto_takes_the_tuned_nodes_and_says_why(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(0.02))
    found = list(tuner.tune(loaded, BRIEF, clock))[-1]
    best = found.pick(expected_tokens(loaded.calibration, 3))
    assert best.nodes > 1
    settings, drafter = resolve(loaded, GenerationSettings())
    assert settings.nodes == len(drafter.tree) == loaded.info.nodes == best.nodes
    assert f"{best.nodes} nodes" in loaded.info.tree_reason
    assert "times plain decoding" in loaded.info.tree_reason


def test_auto_says_plainly_when_plain_decoding_is_faster(monkeypatch, loaded):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.9))))
    assert resolve(loaded, GenerationSettings())[1].tree == TREE.head(1)
    assert "plain decoding is faster than Medusa here" in loaded.info.tree_reason


def test_where_two_nodes_pay_and_four_do_not_each_step_decides(monkeypatch, loaded):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.4))))
    tree = resolve(loaded, GenerationSettings())[1].tree
    assert len(tree) == 4
    assert tuner.draft_budget(loaded, "auto").allow(100).reason == "the heads' probabilities"
    assert "faster than Medusa" not in loaded.info.tree_reason


def test_explicit_nodes_and_trees_are_left_alone(monkeypatch, loaded):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.9))))
    for asked, nodes in ((GenerationSettings(nodes=7), 7), (GenerationSettings(tree="chain-3"), 4)):
        settings, drafter = resolve(loaded, asked)
        assert settings.nodes == nodes == len(drafter.plan([1, 2], 50).tree), "no budget cuts it"


def test_without_a_tuning_auto_is_what_it_was(loaded):
    tree, why = auto_tree(None, 3, CPU, (4, "for cpu"))
    assert len(tree) == 4 and "4 nodes for cpu" in why
    assert tuner.draft_budget(loaded, "auto") is None


def test_too_many_nodes_are_still_refused_with_a_tuning():
    found = tuning_store.Tuning(PLACE, 1, costs_of(0.01), "2026-01-01")
    with pytest.raises(UsageError, match="nodes"):
        auto_tree(None, 3, CPU, (4, "for cpu"), 200, found)


# What is kept.


def test_a_tuning_outlives_the_process(monkeypatch, loaded, folder):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.02))))
    again = loaded_from(folder)
    assert again.tuned == loaded.tuned
    assert again.info.nodes == loaded.info.nodes
    assert again.info.tree_reason == loaded.info.tree_reason
    facts = examine().sections["tuner"]
    assert any("1.06 at 4" in text and "nodes" in text for text in facts.values())


def test_another_place_or_size_is_measured_anew():
    found = tuning_store.Tuning(PLACE, 1000, costs_of(0.02), "2026-01-01")
    tuning_store.write(found)
    assert tuning_store.read(PLACE, 1000) == tuning_store.read(PLACE) == found
    assert tuning_store.read(PLACE, 1001) is None
    for name in ("model", "backbone", "precision", "device", "software"):
        assert tuning_store.read(replace(PLACE, **{name: "another"})) is None


@pytest.mark.parametrize(
    "damage",
    [
        lambda v: "",
        lambda v: "[]",
        lambda v: json.dumps(v)[:-20],
        lambda v: json.dumps(v | {"version": 99}),
        lambda v: json.dumps(v | {"costs": {"sizes": [1], "lengths": [1], "seconds": [[-1]]}}),
        lambda v: "[" * 60_000,
    ],
)
def test_a_damaged_file_is_no_tuning_and_no_error(damage):
    tuning_store.write(tuning_store.Tuning(PLACE, 1000, costs_of(0.02), "2026-01-01"))
    values = json.loads(PLACE.file.read_text("utf-8"))
    PLACE.file.write_text(damage(values), "utf-8")
    assert tuning_store.read(PLACE) is None
    assert list(tuning_store.all_tunings()) == []


def test_a_disk_that_takes_nothing_stops_nobody(monkeypatch, loaded):
    def refuse(*_):
        raise OSError("no space left")

    monkeypatch.setattr(tuning_store.paths, "write_text", refuse)
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.02))))
    assert loaded.tuned is not None and tuning_store.read(loaded.tuned.place) is None


def test_what_was_measured_once_is_not_measured_again(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(0.02))
    list(tuner.tune(loaded, BRIEF, clock))
    count = len(clock.steps)
    assert list(tune_unless_known(loaded, lambda: False)) == [loaded.info]
    assert len(clock.steps) == count


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    return loaded_from(write_checkpoint(tmp_path_factory.mktemp("bare") / "model", heads=0))


@pytest.fixture
def headless(bare):
    """A model without heads, with nothing tuned."""
    bare.tuned = None
    bare.budgets.clear()
    bare.engine.forget()
    return bare


def test_without_heads_chains_of_the_text_are_timed(headless):
    """Real steps: of each size, and at the end the cache as it was."""
    *_, found = time_steps(headless.engine, tuner.CHAIN, BRIEF)
    assert found.sizes[:2] == (1, 4) and found.sizes[-1] <= len(tuner.CHAIN)
    assert headless.engine.backbone.cache.length == 0


@pytest.mark.parametrize(("cost", "most"), [(3.0, 1), (0.01, 16)])
def test_without_heads_the_text_drafts_what_pays(monkeypatch, headless, cost, most):
    """Where a node costs three plain steps nothing is drafted but for what is tried."""
    (info,) = tune_unless_known(headless, lambda: False)
    assert info is headless.info and headless.tuned is not None
    headless.tuned = replace(headless.tuned, costs=costs_of(cost))
    asked = GenerationSettings(max_new_tokens=60, seed=5)
    text = "the same words, and the same words, and the same words, and"
    plain = list(reply(headless, Reply(text, replace(asked, drafter="none"))))
    looked = list(reply(headless, Reply(text, asked)))
    assert looked[-1].token_ids == plain[-1].token_ids
    steps = [event.nodes for event in looked if isinstance(event, Step)]
    assert max(steps) == most if most == 1 else 4 < max(steps) <= most


def test_chains_of_recorded_steps_keep_one_length(monkeypatch, headless):
    monkeypatch.setattr(headless.engine.backend, "tries", 3, raising=False)
    assert list(tune_unless_known(headless, lambda: False)) == [headless.info]
    assert headless.tuned is None, "nothing would read the times"
    list(tuner.tune(headless, BRIEF))
    assert headless.tuned is None
    headless.tuned = tuning_store.Tuning(PLACE, 1, costs_of(3.0), "2026-01-01")
    settings, drafter = resolve(headless, GenerationSettings())
    assert len(drafter.plan([7] * 9, 50).tree) == settings.nodes == 4, "whatever a node costs"


def test_a_job_that_comes_ends_the_measurement_at_the_next_step(monkeypatch, loaded):
    clock = Clock(monkeypatch, costs_of(0.02))
    assert list(tune_unless_known(loaded, lambda: len(clock.steps) >= 5)) == []
    assert len(clock.steps) == 5 and loaded.tuned is None


# Never slower than plain decoding.


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.9, "top_p": 0.9}])
def test_decoding_by_a_budget_says_what_plain_decoding_says(monkeypatch, loaded, settings):
    """Exactness: random heads are as hostile as it gets; the tree shrinks, the text is the same."""
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.02))))
    asked = GenerationSettings(max_new_tokens=80, seed=5, **settings)
    text = "the same words, and the same words again"
    plain = list(reply(loaded, Reply(text, replace(asked, drafter="none"))))
    medusa = list(reply(loaded, Reply(text, replace(asked, drafter="medusa"))))
    assert medusa[-1].token_ids == plain[-1].token_ids
    steps = [event for event in medusa if isinstance(event, Step)]
    assert isinstance(loaded.budgets["medusa"], DraftBudget)
    assert all(step.nodes == len(step.draft.tokens) for step in steps)
    assert all(step.nodes == 1 for step in plain if isinstance(step, Step))


def test_typical_acceptance_keeps_its_tree_for_its_text_depends_on_it(monkeypatch, loaded):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.02))))
    asked = GenerationSettings(acceptance="typical", temperature=0.7, max_new_tokens=60, seed=5)
    steps = [e for e in reply(loaded, Reply("some words", asked)) if isinstance(e, Step)]
    assert {step.nodes for step in steps} == {loaded.info.nodes}


# The page.


class Tuned:
    """A runner whose tuner waits to be stopped as often as `holds` says."""

    on_gone = None

    def __init__(self, holds: int, device: str = "cpu") -> None:
        from support.scripted import ScriptedRunner

        self.script = ScriptedRunner(delay=0, prefill=0, steps=2)
        self.device, self.asked = device, []
        self.holds, self.calls, self.stopped = holds, 0, threading.Event()
        self.began = threading.Event()

    def run(self, request):
        self.asked.append(type(request))
        if isinstance(request, LoadRequest):
            for phase in self.script.run(request):
                model = phase.model and replace(phase.model, device=self.device)
                yield replace(phase, model=model)
            return
        if not isinstance(request, Tune):
            yield from self.script.run(request)
            return
        self.calls += 1
        self.stopped.clear()
        self.began.set()
        if self.calls <= self.holds:
            self.stopped.wait(240)
            return
        yield from self.script.run(request)

    def stop(self):
        self.stopped.set()

    def __getattr__(self, name):
        return getattr(self.script, name)


@pytest.fixture
def session_of(monkeypatch):
    monkeypatch.setattr("medusa_chat.runtime.session.IDLE_SECONDS", 0.01)
    monkeypatch.setattr("medusa_chat.runtime.session.PATIENCE", 0.05)
    made = []

    def make(runner, **options):
        made.append(Session(runner, **options))
        made[-1].submit(LoadRequest())
        return made[-1]

    yield make
    for session in made:
        session.close()


def test_an_idle_session_tunes_once_and_shows_it(session_of):
    runner = Tuned(holds=0)
    session = session_of(runner, tunes=True)
    wait_for(lambda: session.state.model and session.state.model.nodes == 24)
    assert "measured here" in session.state.model.tree_reason
    for _ in range(3):
        assert session.submit(Reply("hello", GenerationSettings())).done.wait(240)
    assert runner.calls == 1


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_first_answer_waits_for_the_timing_on_a_cpu_alone(session_of, device):
    """Without it, drafts had no floor there: 0.7 of plain decoding's speed with one thread."""
    runner = Tuned(holds=0, device=device)
    session = session_of(runner, tunes=True)
    assert session.submit(Reply("hello", GenerationSettings())).done.wait(240)
    wait_for(lambda: Tune in runner.asked)
    order = [LoadRequest, Tune, Reply] if device == "cpu" else [LoadRequest, Reply, Tune]
    assert runner.asked == order


def test_an_answer_that_was_asked_for_during_the_load_waits_no_longer(session_of):
    runner = Tuned(holds=1)
    session = session_of(runner, tunes=True)
    job = session.submit(Reply("hello", GenerationSettings()))
    assert job.done.wait(20) and not job.error and job.trace
    wait_for(lambda: session.state.model.nodes == 24)
    assert runner.asked == [LoadRequest, Tune, Reply, Tune]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_job_stops_the_tuner_and_runs_and_tuning_comes_back(session_of, device):
    runner = Tuned(holds=1, device=device)
    session = session_of(runner, tunes=True)
    assert runner.began.wait(240)
    job = session.submit(Reply("hello", GenerationSettings()))
    assert job.done.wait(240) and not job.error and job.trace
    wait_for(lambda: session.state.model.nodes == 24)
    assert runner.calls == 2


def test_a_session_that_was_not_asked_to_never_tunes(session_of, monkeypatch):
    runner, limits, wait = Tuned(holds=0), [], threading.Condition.wait

    def watched(condition, timeout=None):
        limits.append(timeout)
        return wait(condition, timeout)

    monkeypatch.setattr(threading.Condition, "wait", watched)
    session = session_of(runner)
    assert session.submit(Reply("hello", GenerationSettings())).done.wait(240)
    wait_for(lambda: None in limits)  # it waits for a request without a limit
    assert sessions.IDLE_SECONDS not in limits and runner.calls == 0


def test_timing_again_measures_again(monkeypatch, loaded):
    list(tuner.tune(loaded, BRIEF, Clock(monkeypatch, costs_of(0.02))))
    clock = Clock(monkeypatch, costs_of(0.02))
    monkeypatch.setattr(tuner, "tune", lambda m: tune(m, BRIEF, clock))
    assert list(tune_unless_known(loaded, lambda: False)) == [loaded.info] and not clock.steps
    assert (
        list(tune_unless_known(loaded, lambda: False, again=True)) == [loaded.info] and clock.steps
    )
