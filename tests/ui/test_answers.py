"""An answer as it is drawn: reasoning and words, rows, steps, the rate beside plain decoding."""

import time

import pytest
from support.conversations import ended, owner, turn

from medusa_chat.decoding.events import Step
from medusa_chat.ui.chat import viewer
from medusa_chat.ui.chat.answer import Answer, chatbot_row, rows
from medusa_chat.ui.chat.reasoning_spans import pieces_within, spans, visible_text
from medusa_chat.ui.chat.step_panel import figures


def test_the_plain_rate_is_of_the_answer_and_of_the_last_one_while_it_comes(
    controller, monkeypatch
):
    tab = owner()
    controller.send(tab, turn("hi"))
    ended(controller.session_of(tab))
    answer = controller.answer_of(tab)
    assert answer.plain_rate and controller.plain_of(answer) == answer.plain_rate
    comes = Answer(prefilled=answer.prefilled)
    assert controller.plain_of(comes) == answer.plain_rate
    now = time.monotonic()
    monkeypatch.setattr(viewer.time, "monotonic", lambda: now + viewer.NEAR_SECONDS + 1)
    assert controller.plain_of(comes) is None  # that machine may have other work by now
    assert controller.plain_of(answer) == answer.plain_rate


def test_a_plain_answer_and_one_without_a_timing_have_no_ratio(controller):
    tab = owner()
    controller.send(tab, turn("hi", vanilla=True))
    ended(controller.session_of(tab))
    plain = controller.answer_of(tab)
    assert plain.is_plain and controller.plain_of(plain) is None
    assert figures(plain, controller.plain_of(plain))["ratio"] is None


@pytest.mark.parametrize(
    ("text", "words", "reasoning"),
    [
        ("plain", ["plain"], []),
        ("<think>a</think>b", ["b"], ["a"]),
        ("a</think>b", ["b"], ["a"]),
        ("x<think>a</think>y<think>b</think>", ["x", "y"], ["a", "b"]),
        ("<think>never ends", [], ["never ends"]),
        ("<think></think>b", ["b"], []),
    ],
)
def test_reasoning_is_told_from_words(text, words, reasoning):
    found = spans(text)
    assert [text[s.start : s.end] for s in found if not s.is_reasoning] == words
    assert [text[s.start : s.end] for s in found if s.is_reasoning and s.end > s.start] == reasoning
    assert visible_text(text) == "".join(words)


def test_half_a_tag_is_not_shown_while_it_comes():
    assert [visible_text("ab<think>"[:n]) for n in range(1, 10)] == ["a", "ab"] + ["ab"] * 7
    assert visible_text("a < b") == "a < b"


def test_pieces_are_cut_at_the_span():
    text = "<think>ab</think>cde"
    pieces = [("<thi", 2), ("nk>ab</th", 3), ("ink>c", 1), ("de", 4)]
    thought, words = spans(text)
    assert list(pieces_within(pieces, thought)) == [("ab", 3)]
    assert list(pieces_within(pieces, words)) == [("c", 1), ("de", 4)]


def test_a_note_is_text_whatever_is_in_it():
    drawn = [
        chatbot_row(row, "user")
        for row in rows(({"role": "user", "content": "x"},), {0: "<b>*"}, {})
    ]
    assert drawn[1]["content"][0]["text"] == '<span class="answer-note">&#60;b&#62;&#42;</span>'


def test_an_empty_answer_has_a_row():
    (row,) = rows(({"role": "assistant", "content": ""},), {}, {0: Answer()})
    assert row.kind == "note" and "at once" in row.text


def test_the_steps_of_an_answer_are_its_pieces(controller):
    chat = controller.sessions.open()
    chat.ask(turn())
    ended(chat)
    steps = [event for event in chat.answer.steps if isinstance(event, Step)]
    assert chat.answer.pieces[1:] == [(step.text, len(step.token_ids)) for step in steps]
