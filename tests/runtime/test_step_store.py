"""Recorded steps on disk: there again after a restart, within their limit, broken ones are none."""

import gzip
import json
import os
import random

import pytest
from support.scripted import ScriptedRunner

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.runtime.traces import StepStore, to_json
from medusa_chat.ui.chat.answer import Answer
from medusa_chat.ui.chat.step_panel import panel_line


@pytest.fixture(scope="module")
def events():
    runner = ScriptedRunner(delay=0, prefill=0, steps=6)
    return list(runner.reply([], GenerationSettings()))


def test_events_come_back_as_they_were(tmp_path, events):
    StepStore(tmp_path).save("chat", 2, events)
    store = StepStore(tmp_path)
    assert store.load("chat", 2) == events and store.load("chat", 3) == store.load("x", 2) == []
    store.delete("chat")
    assert store.load("chat", 2) == [] and list(tmp_path.iterdir()) == []


def test_the_oldest_steps_go_first_where_there_is_no_room(tmp_path, events):
    store = StepStore(tmp_path)
    store.save("first", 1, events)
    size = next(tmp_path.glob("*/*")).stat().st_size
    store = StepStore(tmp_path, most=4 * size)
    for number in range(2, 9):
        store.save("chat", number, events)
        os.utime(tmp_path / "chat" / f"{number}.jsonl.gz", ns=(number, 10**18 + number))
        total = sum(file.stat().st_size for file in tmp_path.glob("*/*"))
        assert total <= store.most and store.load("chat", number) == events
    assert store.load("chat", 2) == []
    StepStore(tmp_path, most=10).save("chat", 99, events)
    assert store.load("chat", 99) == []


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{", mtime=0),
        gzip.compress(b'{"event": "step"}', mtime=0),
        gzip.compress(b"[]", mtime=0),
    ],
)
def test_a_broken_file_is_no_steps(tmp_path, data):
    (tmp_path / "chat").mkdir()
    (tmp_path / "chat" / "1.jsonl.gz").write_bytes(data)
    assert StepStore(tmp_path).load("chat", 1) == []


def places(value):
    """Every place of an event's values below the top, as (container, key)."""
    for key in value if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from places(value[key])


def test_a_recording_with_anything_anywhere_in_it_is_drawn_or_is_no_steps(tmp_path, events):
    """A traceback, and no panel, wherever the answer was looked at."""
    chance, outcomes = random.Random(3), set()
    odd = [None, True, -1, 10**400, 1.5, "", "x", [], {}, [[]], {"a": 1}, ["x"], [None], [99, -5]]
    store, file = StepStore(tmp_path), tmp_path / "chat" / "1.jsonl.gz"
    file.parent.mkdir()
    for _ in range(400):
        lines = [json.loads(json.dumps(to_json(event))) for event in events]
        container, key = chance.choice(list(places(lines)))
        container[key] = chance.choice(odd)
        data = "\n".join(map(json.dumps, lines)).encode()
        file.write_bytes(gzip.compress(data, 1))
        answer = Answer()
        answer.recall(found := store.load("chat", 1))
        for index in range(len(answer.steps)):
            json.loads(panel_line(answer, 10.0, index), parse_constant=pytest.fail)
        outcomes.add(bool(found))
    assert outcomes == {True, False}


@pytest.mark.parametrize("lines", [["step"], ["prefilled", "prefilled"], ["prefilled", "NaN"]])
def test_what_is_not_one_answer_is_no_steps(tmp_path, events, lines):
    texts = {
        name: json.dumps(to_json(event))
        for name, event in zip(
            ("prefilled", "step", "finished"), (events[0], events[1], events[-1]), strict=True
        )
    }
    texts["NaN"] = json.dumps(to_json(events[1]) | {"seconds": float("nan")})
    (tmp_path / "chat").mkdir()
    data = "\n".join(texts[name] for name in lines).encode()
    (tmp_path / "chat" / "1.jsonl.gz").write_bytes(gzip.compress(data))
    assert StepStore(tmp_path).load("chat", 1) == []


def test_a_folder_that_cannot_be_written_stops_nothing(tmp_path, events):
    (tmp_path / "file").write_text("in the way")
    store = StepStore(tmp_path / "file")
    store.save("chat", 1, events)
    assert store.load("chat", 1) == []
