"""Text made of token ids: whole characters, stop strings, and sums that hold."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tokenizers import byte_tokenizer

from medusa_chat.decoding.detokenizer import TextStream, TokenTexts, with_text
from medusa_chat.decoding.events import DraftRecord, Finished, Prefilled, Stats, Step
from medusa_chat.runtime.trace_line import from_json, to_json

TOKENIZER = byte_tokenizer()


def ids_of(text: str) -> list[int]:
    return TOKENIZER(text)["input_ids"]


@given(st.text(max_size=40).filter(lambda text: not text.endswith("\ufffd")))
def test_pieces_join_to_the_text_and_are_whole_characters(text):
    stream = TextStream(TOKENIZER)
    pieces = [stream.push(token) for token in ids_of(text)]
    assert "".join(pieces) + stream.tail() == text
    assert all("\ufffd" not in piece or "\ufffd" in text for piece in pieces)


def test_half_a_character_is_never_printed():
    stream = TextStream(TOKENIZER)
    assert "".join(stream.push(token) for token in ids_of("ok 🙂")[:-1]) + stream.tail() == "ok "


@given(
    st.text("ab#\n", max_size=30), st.lists(st.text("ab#\n", min_size=1, max_size=4), max_size=3)
)
def test_text_ends_before_the_first_stop_string_to_complete(text, stops):
    stream = TextStream(TOKENIZER, stops)
    shown = ""
    for token in ids_of(text):
        shown += stream.push(token)
        if stream.is_stopped:
            break
    shown += stream.tail()
    ends = [text.find(s) + len(s) for s in stops if s in text]
    if ends:
        seen = text[: min(ends)]
        assert shown == seen[: min(seen.find(s) for s in stops if s in seen)]
    else:
        assert shown == text


def engine_events(answer: list[int], sizes: list[int]):
    """What an engine gives for an answer emitted in steps of these sizes."""
    stats = Stats.of(len(answer), 1, len(answer) - 1, 0.1, 0.1)
    yield Prefilled("m", "fp32", "cpu", {}, (1,), 1, 0, tuple(answer[:1]), "", 0.1)
    place = 1
    for index, size in enumerate(sizes):
        yield Step(index, tuple(answer[place : place + size]), "", 0.01, tuple(range(size)))
        place += size
    yield Finished("length", tuple(answer), "", "", stats)


@pytest.mark.parametrize("sizes", [[1] * 12, [4, 4, 4], [12]])
def test_a_stop_string_cuts_inside_a_step_alike_however_it_came(sizes):
    answer = ids_of("hello###world")
    events = list(
        with_text(engine_events(answer, sizes), TOKENIZER, TokenTexts(TOKENIZER), ["###"])
    )
    assert events[-1].reason == "stop" and events[-1].text == "hello"
    assert list(events[-1].token_ids) == answer[:8]
    assert "".join(e.text for e in events[:-1]) + events[-1].tail == "hello"


def test_a_step_cut_by_a_stop_string_keeps_the_path_of_its_tokens_and_closes_the_engine():
    events = engine_events(ids_of("hello###world"), [12])
    *_, step, last = with_text(events, TOKENIZER, TokenTexts(TOKENIZER), ["###"])
    assert len(step.path) == len(step.token_ids) + 1 and last.reason == "stop"
    assert events.gi_frame is None, "it was closed"


def test_a_stop_string_in_the_step_where_somebody_stops_is_the_reason():
    events = engine_events(ids_of("a###b"), [4])
    *_, last = with_text(events, TOKENIZER, TokenTexts(TOKENIZER), ["###"], lambda: True)
    assert last.reason == "stop"


def test_texts_of_all_events_join_and_survive_json():
    answer = ids_of("grüße 🙂 ##")
    events = list(
        with_text(engine_events(answer, [3, 5, 9]), TOKENIZER, TokenTexts(TOKENIZER), ["###"])
    )
    assert events[-1].text == "grüße 🙂 ##" and events[-1].tail == "##"
    assert "".join(e.text for e in events[:-1]) + events[-1].tail == events[-1].text
    assert [from_json(to_json(event) | {"new_field": 1}) for event in events] == events


def test_cancel_closes_the_engine_and_tells_so():
    closed = []

    def events():
        try:
            yield from engine_events(ids_of("hello world!!"), [1] * 12)
        finally:
            closed.append(True)

    asked = iter([False, False, True])
    got = list(with_text(events(), TOKENIZER, TokenTexts(TOKENIZER), (), lambda: next(asked)))
    assert closed and got[-1].reason == "cancelled" and got[-1].text == "hell"
    assert got[-1].stats.steps == 3 and got[-1].stats.new_tokens == 4


def test_a_stop_that_comes_with_the_end_changes_nothing():
    answer = ids_of("hi")
    got = list(
        with_text(engine_events(answer, [1]), TOKENIZER, TokenTexts(TOKENIZER), (), lambda: True)
    )
    assert [event.text for event in got] == ["h", "i", "hi"] and got[-1].reason == "cancelled"
    asked = iter([False, True])
    got = list(
        with_text(
            engine_events(answer, [1]), TOKENIZER, TokenTexts(TOKENIZER), (), lambda: next(asked)
        )
    )
    assert got[-1].reason == "length"


@pytest.mark.parametrize(("given", "following"), [("bc", "c"), ("b", "")])
def test_a_draft_has_the_texts_of_its_nodes_and_of_the_token_behind_its_path(given, following):
    draft = DraftRecord(tuple(ids_of("ab")), (-1, 0), *[(None, None)] * 6)
    step = Step(0, tuple(ids_of(given)), "", 0.01, (0, 1), draft)
    (told,) = with_text((one for one in [step]), TOKENIZER, TokenTexts(TOKENIZER))
    assert told.draft.texts == ("a", "b") and told.draft.next_text == following


def test_token_texts_show_bytes_of_split_characters():
    texts = TokenTexts(TOKENIZER)
    assert [texts(token) for token in ids_of("a é")] == ["a", " ", "<0xC3>", "<0xA9>"]
