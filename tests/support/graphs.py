"""Answers with recorded steps beside answers without."""

from dataclasses import replace

import pytest

from medusa_chat.decoding.backends.cuda_graph_step import CudaGraphStep
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.runtime.traces import to_json
from support.engines import PROMPT, on

NEW = 24


def settings_of(**changes):
    return GenerationSettings(**{"drafter": "none", "seed": 3, "max_new_tokens": NEW} | changes)


def answer(engine, way, tree, settings, details=True, prompt=PROMPT, drafter=None):
    """All events of an answer from an empty cache, its steps run by this backend or (None) by the
    engine's own."""
    engine = engine if way is None else on(engine, way)
    engine.forget()
    if len(tree) > 1:
        settings = replace(settings, drafter="medusa")
    drafter = drafter or engine.drafter(settings, tree)
    return list(engine.generate(prompt, drafter, settings, details))


def both_ways(engine, tree, settings, details=True, prompt=PROMPT, drafter=lambda recorded: None):
    """An answer by recorded steps, which is that by the engine's own; and what recorded them.
    drafter: makes one for each of the two answers."""
    recorded = CudaGraphStep(engine.backbone)
    wanted, found = (
        answer(engine, way, tree, settings, details, prompt, drafter(recorded))
        for way in (None, recorded)
    )
    assert_same(found, wanted)
    return found, recorded


def without_times(event):
    values = to_json(event)
    values.get("stats", {}).clear()
    values.pop("backend", None)
    return {name: value for name, value in values.items() if "seconds" not in name}


def assert_same(ours, theirs):
    """Of events: the same but for times, and figures to rounding."""
    assert len(ours) == len(theirs)
    for one, other in zip(map(without_times, ours), map(without_times, theirs), strict=True):
        drafts = [values.pop("draft", None) for values in (one, other)]
        assert one == other
        if None not in drafts:
            for name in drafts[0]:
                mine, others = (draft[name] for draft in drafts)
                assert mine == pytest.approx(others, abs=1e-4, nan_ok=True), name


def tokens(events):
    return events[-1].token_ids
