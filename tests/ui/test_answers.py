"""An answer as it is drawn: reasoning and words, rows, steps, the rate beside plain decoding."""

import time

from support.conversations import ended, owner, turn

from medusa_chat.decoding.events import Step
from medusa_chat.ui.chat import viewer
from medusa_chat.ui.chat.answer import Answer, chatbot_row, rows
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


def test_reasoning_and_text_are_rows_and_blank_ones_are_none():
    def kinds(content, reasoning=""):
        message = {"role": "assistant", "content": content, "reasoning": reasoning}
        return [(row.kind, row.text) for row in rows((message,), {}, {})]

    assert kinds("b", "a") == [("reasoning", "a"), ("text", "b")]
    assert kinds("b", "\n") == kinds("b") == [("text", "b")]
    assert kinds("", "a") == [("reasoning", "a")]
    literal = "say `<think>` or </think> <think>"
    assert kinds(literal) == [("text", literal)]


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
