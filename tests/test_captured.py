"""Steps of fixed shapes, run ahead of the host: the same tokens as the engine's, on the CPU, where
the body is called instead of replayed."""

import itertools

import pytest
import torch
from families import CONTEXT, VOCABULARY, tiny
from test_engine import PROMPT, engine_of

from medusa_chat.decoding import captured as capturing
from medusa_chat.decoding.captured import Captured
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.decoding.submodules import replace_submodules
from medusa_chat.decoding.tree import ROOT, cartesian, chain

NEW = 20


def prepared(family="llama", merged=False):
    model = tiny(family)
    if merged:
        replace_submodules(model)
    return engine_of(model)


def settings_of(**changes):
    return GenerationSettings(**{"drafter": "none", "seed": 3, "max_new_tokens": NEW} | changes)


def plain(engine, settings, prompt=PROMPT):
    drafter = engine.drafter(settings, ROOT)
    return list(engine.generate(prompt, drafter, settings))[-1].token_ids


def run_ahead(engine, tree, settings, count=NEW, prompt=PROMPT):
    """Tokens and steps of a captured answer, prefilled by the engine."""
    drafter = engine.drafter(settings, ROOT)
    events = engine.generate(prompt, drafter, settings)
    first = next(events).token_ids[0]
    events.close()
    hidden = torch.zeros(1, engine.heads.bias.shape[-1])
    steps = Captured(engine.backbone, engine.heads, tree, settings).run(
        torch.tensor([first]), hidden
    )
    tokens, taken = [first], []
    for step in steps:
        taken.append(step)
        tokens += step.tokens
        if len(tokens) >= count:
            break
    steps.close()
    return tokens[:count], taken


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_fixed_shapes_give_the_engines_tokens(family, temperature):
    engine = prepared(family)
    settings = settings_of(temperature=temperature)
    wanted = plain(engine, settings)
    for tree in (ROOT, chain(3), cartesian(3, 2)):
        engine.forget()
        found, taken = run_ahead(engine, tree, settings)
        assert tuple(found) == wanted
        assert all(len(step.tokens) == len(step.path) for step in taken)


def test_merged_layers_give_them_too():
    engine = prepared(merged=True)
    settings = settings_of()
    assert tuple(run_ahead(engine, cartesian(3, 2), settings)[0]) == plain(engine, settings)


def test_accepted_paths_are_moved_into_place():
    """Heads that know the answer: whole paths are accepted through other nodes than the first."""
    engine = prepared()
    settings = settings_of(max_new_tokens=32)
    answer = list(plain(engine, settings))
    tree = cartesian(3, 2)
    engine.forget()

    class Knowing(capturing.CapturedStep):
        def draft_from(self, hidden):
            at = int(self.state.cur) - len(PROMPT) + 1
            ahead = [answer[at + d] if at + d < len(answer) else 1 for d in range(2)]
            wrong = [
                [(t + 1) % VOCABULARY, (t + 2) % VOCABULARY, t] for t in ahead
            ]  # right: the last rank
            wrong[1] = [(ahead[1] + 1) % VOCABULARY, ahead[1], (ahead[1] + 2) % VOCABULARY]
            self.state.candidates.copy_(torch.tensor(wrong).flatten())

    real, capturing.CapturedStep = capturing.CapturedStep, Knowing
    try:
        found, taken = run_ahead(engine, tree, settings, 24)
    finally:
        capturing.CapturedStep = real
    assert found == answer[:24]
    assert max(len(step.path) for step in taken) == 3
    assert any(step.path != list(range(len(step.path))) for step in taken)


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_a_closed_answer_leaves_the_cache_valid(stop_after):
    """The step that was in the queue when the answer was closed leaves no trace."""
    engine = prepared()
    settings = settings_of()
    wanted = plain(engine, settings)
    engine.forget()
    found, taken = run_ahead(engine, chain(2), settings, count=stop_after + 1)
    length = len(PROMPT) + sum(len(step.path) for step in taken)
    assert engine.backbone.cache.length == length
    engine._ids = [*PROMPT, *itertools.chain([found[0]], *(s.tokens for s in taken))][:length]
    longer = [*PROMPT, *wanted[: stop_after + 1], 7, 9]
    kept = plain(engine, settings, longer)
    engine.forget()
    assert kept == plain(engine, settings, longer)


def test_a_bucket_is_left_for_the_next_one_on_the_way(monkeypatch):
    monkeypatch.setattr(capturing, "BUCKETS", (16, 24, 40))
    engine = prepared()
    settings = settings_of(max_new_tokens=30)
    wanted = plain(engine, settings)
    engine.forget()
    drafter = engine.drafter(settings, ROOT)
    first = next(engine.generate(PROMPT, drafter, settings)).token_ids[0]
    made = Captured(engine.backbone, engine.heads, chain(2), settings)
    tokens = [first]
    for step in made.run(torch.tensor([first]), torch.zeros(1, engine.heads.bias.shape[-1])):
        tokens += step.tokens
        if len(tokens) >= 30:
            break
    assert tuple(tokens[:30]) == wanted
    assert len(made.steps) >= 3 and set(made.steps) <= {16, 24, 40, engine.backbone.cache.capacity}


def test_it_ends_before_the_context_is_full():
    engine = prepared()
    prompt = [(7 * i + 3) % VOCABULARY for i in range(CONTEXT - 12)]
    settings = settings_of()
    tokens, _ = run_ahead(engine, chain(3), settings, count=1000, prompt=prompt)
    assert len(tokens) > 2
    assert engine.backbone.cache.length <= CONTEXT
    assert tuple(tokens) == plain(engine, settings_of(max_new_tokens=len(tokens)), prompt)
