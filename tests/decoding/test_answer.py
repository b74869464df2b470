"""An answer as it grows: its text, stop strings, and sums that hold."""

import sys
from types import SimpleNamespace

import pytest
import torch
from support.tokenizers import byte_fallback_tokenizer, byte_tokenizer

from medusa_chat.decoding import answer as answers
from medusa_chat.decoding.answer import Answer
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.events import DraftRecord
from medusa_chat.decoding.step import StepResult
from medusa_chat.runtime.traces import from_json, to_json

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


def told(text: str, sizes: list[int], stop=("###",), record=None, limit=99) -> tuple:
    """The first token's text, and the events, of an answer that came in steps of these sizes."""
    answer = Answer(frozenset(), limit, "length", TokenTexts(TOKENIZER), stop)
    ids = ids_of(text)
    _, first = answer.begin(StepResult([0], [], ids[0], True), 0.1)
    first = first.text
    events, place = [], 1
    for size in sizes:
        if answer.reason is None:
            tokens = ids[place : place + size]
            result = StepResult(list(range(len(tokens))), [], 0, True, record=record)
            events.append(answer.step(tokens, result, 0.01, 0.01, ""))
            place += size
    answer.reason = answer.reason or "length"
    return first, *events, answer.finished()


@pytest.mark.parametrize("sizes", [[1] * 12, [4, 4, 4], [12]])
def test_a_stop_string_cuts_inside_a_step_alike_however_it_came(sizes):
    first, *steps, last = told("hello###world", sizes)
    assert last.reason == "stop" and last.text == "hello"
    assert list(last.token_ids) == ids_of("hello###world")[:8]
    assert first + "".join(step.text for step in steps) + last.tail == "hello"
    assert len(steps[-1].path) == len(steps[-1].token_ids) + (sizes != [1] * 12)
    assert last.stats.busy_seconds == pytest.approx(last.stats.seconds)


def test_a_stop_string_that_ends_with_the_last_token_is_the_reason():
    assert told("a###", [3], limit=4)[-1].reason == "stop"
    assert told("a##b", [3], limit=4)[-1].reason == "length"


def test_texts_of_all_events_join_and_survive_json():
    first, *events, last = told("grüße 🙂 ##", [3, 5, 9])
    assert last.text == "grüße 🙂 ##" and last.tail == "##"
    assert first + "".join(event.text for event in events) + last.tail == last.text
    for event in (*events, last):
        assert from_json(to_json(event) | {"new_field": 1}) == event


@pytest.mark.parametrize("size", [1, 2, 5])
def test_an_answer_of_stray_bytes_goes_on_and_is_whole(size):
    """Vocabularies with byte fallback ended it with an error in mid-stream."""
    tokenizer = byte_fallback_tokenizer()
    ids = tokenizer.convert_tokens_to_ids(["<0x0A>", "<0xC3>", "ab", "<0xA9>", "a", "<0xF0>"])
    answer = Answer(frozenset(), 6, "length", TokenTexts(tokenizer), ())
    text = answer.begin(StepResult([0], [], ids[0], True), 0.1)[1].text
    for start in range(1, 6, size):
        tokens = ids[start : start + size]
        text += answer.step(tokens, StepResult([0], [], 0, True), 0.1, 0.1, "").text
    last = answer.finished()
    assert (last.reason, last.tail) == ("length", "\ufffd")
    assert text + last.tail == last.text == "\n\ufffdab\ufffda\ufffd"
    assert list(last.token_ids) == ids


@pytest.mark.parametrize(("given", "following"), [("bc", "c"), ("b", "")])
def test_a_draft_has_the_texts_of_its_nodes_and_of_the_token_behind_its_path(given, following):
    draft = DraftRecord(tuple(ids_of("ab")), (-1, 0), *[(None, None)] * 6)
    answer = Answer(frozenset(), 9, "length", TokenTexts(TOKENIZER), ())
    step = answer.step(ids_of(given), StepResult([0, 1], [], 0, True, record=draft), 0.1, 0.1, "")
    assert step.draft.texts == ("a", "b") and step.draft.next_text == following


def test_the_coarse_clock_of_windows_times_no_step(monkeypatch):
    """It ticks every 16 ms and says every 100 ns: a step of 2 ms took nothing."""
    monkeypatch.setattr(answers, "get_clock_info", lambda _: SimpleNamespace(resolution=1e-7))
    assert answers.busy_clock(torch.device("cpu")) is answers.thread_time
    monkeypatch.setattr(sys, "platform", "win32")
    assert answers.busy_clock(torch.device("cpu")) is answers.perf_counter
