"""Steps of fixed shapes, queued ahead of the host: what their parts give, on the CPU, where the
body is called instead of replayed."""

import logging
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from support.engines import PROMPT, engine_of, on
from support.families import CONTEXT, VOCABULARY, tiny
from support.graphs import NEW, answer, assert_same, both_ways, settings_of, tokens
from support.step_costs import times_of

from medusa_chat.bench.step_profiler import time_steps
from medusa_chat.checkpoints.load import _warm_up
from medusa_chat.checkpoints.prepare import try_cuda_graphs
from medusa_chat.decoding import graph_capture
from medusa_chat.decoding.backends import cuda_graph_step as ahead
from medusa_chat.decoding.backends.cuda_graph_step import ASKED, CudaGraphStep, RecordedStep
from medusa_chat.decoding.backends.replacements import replace_submodules
from medusa_chat.decoding.budget import Allowance, Budget
from medusa_chat.decoding.drafters import kinds, tree_drafting
from medusa_chat.decoding.drafters.continuation import Guess
from medusa_chat.decoding.drafters.tree_drafting import TreeDrafting
from medusa_chat.decoding.step import TorchStep
from medusa_chat.decoding.tree import ROOT
from medusa_chat.trees.shapes import cartesian, chain

SETTINGS = [
    {},
    {"temperature": 0.9},
    {"temperature": 0.9, "top_k": 5, "top_p": 0.8},
    {"temperature": 0.9, "min_p": 0.2},
    {"temperature": 0.8, "acceptance": "typical"},
    {"temperature": 0.8, "acceptance": "typical-sampled"},
]


# All settings on one family; on the others, which differ in masks and layers, the ends of the list.
GRID = [
    pytest.param(family, changes, id="-".join((family, *map(str, changes.values()))))
    for family in ("llama", "mistral-window", "qwen3", "gemma3")
    for changes in (SETTINGS if family == "llama" else (SETTINGS[0], SETTINGS[-1]))
]


@pytest.mark.parametrize(("family", "changes"), GRID)
def test_fixed_shapes_give_what_their_parts_give(family, changes):
    engine, settings = engine_of(tiny(family)), settings_of(**changes)
    asked = ((ROOT, True), (chain(3), False), (cartesian(3, 2), True), (cartesian(3, 2), False))
    for tree, details in asked:
        _, recorded = both_ways(engine, tree, settings, details)
        assert recorded.seconds > 0


def test_merged_layers_give_it_too():
    model = tiny("llama")
    replace_submodules(model)
    both_ways(engine_of(model), cartesian(3, 2), settings_of())


def test_steps_that_copy_from_the_text_record_plain_ones_without_its_tokens():
    """A step without a match is recorded as plain decoding's: no token of it may stay in there."""
    engine, settings = engine_of(tiny("llama")), settings_of(drafter="prompt-lookup", nodes=4)
    _, recorded = both_ways(engine, ROOT, settings, prompt=list(range(2, 12)))
    assert recorded.seconds > 0


def test_prompt_lookup_is_recorded_as_one_kind_of_step():
    engine, settings = engine_of(tiny("llama")), settings_of(drafter="prompt-lookup", nodes=5)
    _, recorded = both_ways(engine, ROOT, settings, prompt=[5, 9, 13] * 6)
    kinds = [kind for kind in recorded._kinds.values() if kind.plan.text is not None]
    assert [len(kind.plan.tree) for kind in kinds if kind.steps] == [5]


def test_the_least_recently_used_kinds_are_dropped(monkeypatch):
    monkeypatch.setattr(ahead, "MOST_KINDS", 2)
    engine = engine_of(tiny("llama"))
    recorded = CudaGraphStep(engine.backbone)
    for cut in ({"top_p": 0.5}, {"min_p": 0.1}, {"top_p": 0.5}, {"min_p": 0.2}):
        answer(engine, recorded, ROOT, settings_of(temperature=0.9, **cut))
    assert [key[-1][2:] for key in recorded._kinds] == [(0.5, 0.0), (1.0, 0.2)]


class Knowing:
    """Levels that know the answer by the state behind each of its tokens: whole paths are accepted,
    through other nodes than the first."""

    kind = kinds.MEDUSA

    def __init__(self, engine, answer):
        engine.forget()
        whole = torch.tensor([*PROMPT, *answer])
        self.states = engine.backbone.run_chunk(whole)[len(PROMPT) - 1 :]
        self.answer = answer

    def require(self, tree): ...

    def guesses(self, hidden, root, depth, width):
        ids, at = self.answer, int((self.states - hidden).abs().sum(1).argmin())
        ahead = [ids[at + 1 + d] if at + 1 + d < len(ids) else 1 for d in range(2)]
        rows = [[(t + 1) % VOCABULARY, (t + 2) % VOCABULARY, t] for t in ahead]
        rows[1] = [(ahead[1] + 1) % VOCABULARY, ahead[1], (ahead[1] + 2) % VOCABULARY]
        return torch.zeros(2, 3), torch.tensor(rows), torch.zeros(2)


def test_accepted_paths_are_moved_into_place():
    engine, tree = engine_of(tiny("llama")), cartesian(3, 2)
    settings, backbone = settings_of(max_new_tokens=40), engine.backbone
    known = list(tokens(answer(engine, None, ROOT, settings)))
    steps = []
    for way in (None, CudaGraphStep(backbone)):
        drafter = TreeDrafting(Knowing(engine, known), backbone.device, tree)
        events = answer(engine, way, tree, settings, False, drafter=drafter)
        assert list(tokens(events)) == known
        steps.append([event.path for event in events[1:-1]])
    assert steps[0] == steps[1]
    assert min(map(len, steps[1][:-1])) == 3
    assert all(path != tuple(range(len(path))) for path in steps[1][:-1])


@pytest.mark.parametrize("stop_after", [4, 5, 9])
def test_a_closed_answer_leaves_the_cache_valid(stop_after):
    """The step that was in the queue when the answer was closed leaves no trace."""
    engine, settings = engine_of(tiny("llama")), settings_of(drafter="medusa")
    recorded, tree = CudaGraphStep(engine.backbone), chain(2)
    wanted = tokens(answer(engine, None, tree, settings))
    engine = on(engine, recorded)
    engine.forget()
    events = engine.generate(PROMPT, engine.drafter(settings, tree), settings)
    for _ in range(stop_after + 1):
        next(events)
    events.close()
    assert recorded._queued is not None
    again = list(engine.generate(PROMPT, engine.drafter(settings, tree), settings))
    assert tokens(again) == wanted
    longer = [*PROMPT, *wanted[:6], 7, 9]
    kept = list(engine.generate(longer, engine.drafter(settings, tree), settings))
    assert kept[0].reused_tokens >= len(PROMPT) + 6
    assert tokens(kept) == tokens(answer(engine, None, tree, settings, prompt=longer))


def test_a_bucket_is_left_for_the_next_one_on_the_way(monkeypatch):
    monkeypatch.setattr(graph_capture, "SHORTEST", 16)  # then 24, 40, 64
    _, recorded = both_ways(engine_of(tiny("llama")), chain(2), settings_of(max_new_tokens=40))
    made = {bucket for kind in recorded._kinds.values() for bucket in kind.steps}
    assert len(made) >= 3 and made <= {16, 24, 40, 64}


def test_the_context_ends_an_answer_as_it_does_by_parts():
    engine = engine_of(tiny("llama"))
    prompt = [(7 * i + 3) % VOCABULARY for i in range(CONTEXT - 30)]
    for tree in (ROOT, chain(3), cartesian(3, 2)):
        found, _ = both_ways(engine, tree, settings_of(max_new_tokens=1000), prompt=prompt)
        assert found[-1].reason == "context"


class Moody(Budget):
    """Asks for another number of nodes whenever its list does."""

    def __init__(self, sizes):
        super().__init__(times_of(0.03))
        self.begin([1.0] * 7, False)
        self.sizes = cycle(sizes)

    def allow(self, text=()):
        return Allowance(next(self.sizes), "the list")


@pytest.mark.parametrize("sizes", [(1, 4), (7, 7, 7, 1, 1, 4, 4), (1, 1, 1, 1, 1, 7)])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_budget_that_changes_its_mind_drops_what_was_queued(sizes, temperature):
    engine, tree = engine_of(tiny("llama")), cartesian(2, 2)
    settings = settings_of(drafter="medusa", temperature=temperature, max_new_tokens=60)

    def drafter(_):
        return engine.drafter(settings, tree, budget=Moody(sizes))

    _, recorded = both_ways(engine, tree, settings, drafter=drafter)
    assert {len(kind.plan.tree) for kind in recorded._kinds.values()} == set(sizes)


def test_the_next_step_is_queued_only_behind_two_of_its_kind(monkeypatch):
    engine, settings = engine_of(tiny("llama")), settings_of()
    recorded, queued = CudaGraphStep(engine.backbone), []
    real = CudaGraphStep._queue

    def queue(self, kind, here, length):
        queued.append(length - engine.backbone.cache.length)
        return real(self, kind, here, length)

    monkeypatch.setattr(CudaGraphStep, "_queue", queue)
    answer(engine, recorded, ROOT, settings)
    steps = NEW - 1  # the first token is the prefill's
    assert queued[:2] == [0, 0] and set(queued[2:]) == {1}
    assert len(queued) == steps - (ASKED - 1)  # none behind the end, the first ones are parts'


def test_numbers_of_the_settings_need_no_other_recording(monkeypatch):
    """A slider that moves, and the fresh seed of every answer, must not record anew."""
    engine, made = engine_of(tiny("llama")), []
    real = RecordedStep.__init__
    monkeypatch.setattr(
        RecordedStep, "__init__", lambda self, *a: (made.append(self), real(self, *a))[1]
    )
    recorded = CudaGraphStep(engine.backbone)
    for seed, temperature in enumerate((0.5, 0.9, 1.3)):
        for acceptance in ("exact", "typical"):
            settings = settings_of(
                seed=seed,
                temperature=temperature,
                acceptance=acceptance,
                posterior_alpha=0.2 + seed / 9,
            )
            wanted = answer(engine, None, chain(2), settings)
            assert_same(answer(engine, recorded, chain(2), settings), wanted)
    assert len(made) == 2  # one for each acceptance


def test_the_first_answer_finds_its_steps_recorded(monkeypatch):
    """A load's warm-up records what the page will ask for: plain and with the tree, both kinds of
    settings, with details."""
    engine, tree = engine_of(tiny("llama")), cartesian(2, 2)
    recorded = CudaGraphStep(engine.backbone)
    engine = on(engine, recorded)
    _warm_up(engine, tree)
    monkeypatch.setattr(RecordedStep, "__init__", lambda *_: pytest.fail("recorded only now"))
    for shape in (ROOT, tree):
        for temperature in (0.0, 0.7):
            before = recorded.seconds
            answer(engine, recorded, shape, settings_of(temperature=temperature))
            assert recorded.seconds > before


def test_the_rehearsal_times_recorded_steps():
    """What the profiler measures is what answers have: no step by its parts among them, and no time
    that recording takes."""
    engine, tree = engine_of(tiny("llama")), cartesian(2, 2)
    recorded = CudaGraphStep(engine.backbone)
    engine = on(engine, recorded)
    tried, real = [0], recorded._by_operators.step
    recorded._by_operators.step = lambda *asked: (tried.append(1), real(*asked))[1]
    *_, costs = time_steps(engine, tree, budget=0.05)
    sizes = len(costs.sizes)
    assert sum(tried) <= (ASKED - 1) * (sizes + 1) and recorded.seconds > 0
    assert costs.sizes[0] == 1 and len(costs.lengths) == len(costs.seconds)


def test_what_cannot_be_recorded_runs_by_its_parts_and_says_so_once(monkeypatch, caplog):
    def refused(self):
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    engine, recorded = engine_of(tiny("llama")), None
    wanted = answer(engine, None, chain(2), settings_of())
    monkeypatch.setattr(RecordedStep, "body", refused)
    recorded = CudaGraphStep(engine.backbone)
    with caplog.at_level(logging.WARNING):
        for tree in (chain(2), chain(2), ROOT):
            found = answer(engine, recorded, tree, settings_of())
            assert tokens(found) == tokens(wanted)
    (line,) = caplog.messages
    assert line.endswith("operation not permitted when stream is capturing")


def test_a_failure_on_the_way_loses_nothing(monkeypatch):
    """Recording the next bucket fails while a step is in the queue."""
    monkeypatch.setattr(graph_capture, "SHORTEST", 16)  # then 24, 40, 64
    real = RecordedStep.__init__

    def limited(self, *given):
        if given[-1] > 24:
            raise torch.OutOfMemoryError("no room for another")
        real(self, *given)

    monkeypatch.setattr(RecordedStep, "__init__", limited)
    both_ways(engine_of(tiny("llama")), chain(2), settings_of(max_new_tokens=40, temperature=0.9))


def test_where_memory_runs_out_nothing_is_recorded_any_more(monkeypatch):
    """What its parts need may be what recordings hold."""
    engine, made = engine_of(tiny("llama")), []

    def full(self, *asked):
        made.append(asked)
        raise torch.OutOfMemoryError("no room for another")

    monkeypatch.setattr(RecordedStep, "__init__", full)
    recorded = CudaGraphStep(engine.backbone)
    for tree in (chain(2), ROOT, cartesian(2, 2)):
        wanted = answer(engine, None, tree, settings_of())
        assert_same(answer(engine, recorded, tree, settings_of()), wanted)
    assert len(made) == 1 and not recorded._kinds


def test_a_broken_pass_leaves_nothing_to_those_after_it():
    """Steps of fixed shapes read the rows behind the text: nothing there may be no number."""
    model = tiny("llama")
    with torch.no_grad():
        model.model.embed_tokens.weight[40] = torch.nan
    engine = engine_of(model)
    wanted = answer(engine, None, ROOT, settings_of())
    engine = on(engine, CudaGraphStep(engine.backbone))
    for prompt, reason in (([3, 5, 40, *[7] * 40], "error"), (PROMPT, "length")) * 2:
        drafter = engine.drafter(settings_of(), ROOT)
        found = list(engine.generate(prompt, drafter, settings_of()))
        assert found[-1].reason == reason
    assert tokens(found) == tokens(wanted)


def test_a_step_that_breaks_leaves_nothing_either():
    """The root itself is the token whose numbers are broken."""
    model = tiny("llama")
    engine = engine_of(model)
    wanted = answer(engine, None, ROOT, settings_of())
    token = tokens(wanted)[8]
    kept = model.model.embed_tokens.weight[token].clone()
    recorded = CudaGraphStep(engine.backbone)
    engine = on(engine, recorded)
    for is_broken in (True, False):
        with torch.no_grad():
            model.model.embed_tokens.weight[token] = torch.nan if is_broken else kept
        engine.forget()
        prompt = [t for t in PROMPT if t != token]
        *_, last = engine.generate(prompt, engine.drafter(settings_of(), ROOT), settings_of())
    assert recorded.seconds > 0 and last.reason == "length"


# ---- the trial at every load ----


def tried():
    """What a trial chooses, and why."""
    engine = engine_of(tiny("llama"))
    return try_cuda_graphs(engine.backbone, engine.heads)


def test_a_trial_adopts_what_is_right():
    backend, why = tried()
    assert isinstance(backend, CudaGraphStep) and not why


@pytest.mark.parametrize("fault", ["mask", "places", "hidden"])
def test_a_trial_refuses_what_is_wrong(monkeypatch, fault):
    """An ancestor that is not seen, rows in other places, heads behind another state."""
    real = RecordedStep.body

    def body(self):
        real(self)
        if fault == "places":
            self._state.cur.add_(1)
        if fault == "hidden":
            self._state.hidden.neg_()

    monkeypatch.setattr(RecordedStep, "body", body)
    if fault == "mask":
        real_run = RecordedStep._run

        def run(self, draft):
            backbone, masks_behind = self._backbone, self._backbone.masks_behind

            def rolled(*asked):
                return {w: mask.roll(1, 1) for w, mask in masks_behind(*asked).items()}

            with monkeypatch.context() as patch:
                patch.setattr(backbone, "masks_behind", rolled)
                return real_run(self, draft)

        monkeypatch.setattr(RecordedStep, "_run", run)
    backend, why = tried()
    assert isinstance(backend, TorchStep) and "other results" in why


def test_a_trial_says_that_a_recording_failed(monkeypatch, caplog):
    def refused(self):
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(RecordedStep, "body", refused)
    with caplog.at_level(logging.WARNING):
        assert "failed" in tried()[1]
    assert any("not permitted" in message for message in caplog.messages)


def combined_of(engine, tree, settings, budget=lambda: None):
    """Makes the drafter "auto" of a backend that records its steps."""
    asked = replace(settings, drafter="auto")
    return lambda recorded: on(engine, recorded).drafter(asked, tree, budget())


def told(monkeypatch, answer):
    """Let the text offer the next tokens of this answer, every other time with a wrong one."""

    class Told:
        def __init__(self):
            self.seen = -len(PROMPT)

        def read(self, tokens):
            self.seen += len(tokens)

        def guess(self, depth):
            count = min(depth, 2 if self.seen % 3 else 4)
            ids = [*answer[self.seen : self.seen + count], *[1] * count][:count]
            ids[-1] = (ids[-1] + self.seen % 2) % VOCABULARY
            return Guess(tuple(ids), (0.9,) * count, (0.9,) * count) if count else None

    monkeypatch.setattr(tree_drafting, "Continuation", Told)


@pytest.mark.parametrize(
    ("family", "changes"), [one for one in GRID if one.values[0] in ("llama", "gemma3")]
)
def test_what_the_text_repeats_is_a_part_of_recorded_steps(monkeypatch, family, changes):
    """Its tokens are the host's, put into the recording before each step."""
    details = family == "llama"
    engine, tree = engine_of(tiny(family)), cartesian(3, 2, 1)
    settings = settings_of(**changes, max_new_tokens=60)
    plain = tokens(answer(engine, None, ROOT, settings, details))
    told(monkeypatch, plain)
    drafter = combined_of(engine, tree, settings)
    found, recorded = both_ways(engine, tree, settings, details, drafter=drafter)
    texts = [kind for kind in recorded._kinds.values() if kind.plan.text is not None]
    assert {len(kind.plan.text) for kind in texts if kind.steps} == {2, 4}
    assert {len(kind.plan.tree) for kind in texts} == {len(tree)}
    if details:
        named = [step.draft for step in found[1:-1] if step.draft.sources]
        assert named and {"heads", "text"} <= set(named[0].sources)
    if settings.acceptance == "exact":
        assert tokens(found) == plain
        assert max(len(step.path) for step in found[1:-1]) > 3


@pytest.mark.parametrize("sizes", [(10,), (10, 1, 10, 10, 5)])
def test_a_budget_and_the_text_in_recorded_steps(monkeypatch, sizes):
    engine, tree = engine_of(tiny("llama")), cartesian(3, 2)
    settings = settings_of(max_new_tokens=60)
    plain = tokens(answer(engine, None, ROOT, settings))
    told(monkeypatch, plain)
    drafter = combined_of(engine, tree, settings, budget=lambda: Moody(sizes))
    assert tokens(both_ways(engine, tree, settings, drafter=drafter)[0]) == plain
