"""An answer as it is drawn: reasoning and words, rows, steps, the rate beside plain decoding."""

import time
from dataclasses import replace

import pytest
from support.conversations import ended, owner, turn

from medusa_chat.decoding.events import Finished, Prefilled, Stats, Step
from medusa_chat.ui.chat import viewer
from medusa_chat.ui.chat.answer import Answer, chatbot_row, rows
from medusa_chat.ui.chat.step_panel import figures
from medusa_chat.ui.chat.transcript import figures_of


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


def answered(rows, reason="length", plain=0.01, **settings):
    """A finished answer: a token of its prompt, then a step of 0.02 s for each row of tokens."""
    first = Prefilled("m", "fp32", "cpu", settings, (1,), 1, 0, (9000,), "begin", 0.1)
    steps = [Step(n, row, f" {row[0]}", 0.02, (0,)) for n, row in enumerate(rows)]
    ids = (9000, *(token for row in rows for token in row))
    emitted, seconds = len(ids) - 1, 0.02 * len(rows)
    stats = replace(Stats.of(len(ids), len(rows), emitted, seconds, 0.1), plain_step_seconds=plain)
    answer = Answer()
    answer.add([first, *steps, Finished(reason, ids, "", "", stats)])
    return answer


def test_figures_of_an_answer_that_repeats_itself_are_of_what_stands_before():
    said = [(n, n + 100) for n in range(10)]  # two tokens a step
    loop = [(500, 501, 502, 503)] * 40  # and four, where the text is guessed from itself
    answer = answered([*said, *loop])
    assert answer.loop == 11, "the passage itself is no repetition yet"
    found = figures(answer, answer.plain_rate)
    assert found["per_step"] == pytest.approx((10 * 2 + 4) / 11, rel=1e-3)
    assert found["ratio"] == pytest.approx((24 / 0.22) / 100, rel=1e-3)
    assert figures_of(answer).per_step == pytest.approx(24 / 11, abs=0.01)
    assert "repeats itself from “500 500" in answer.note
    assert found["loop"] == 11
    recalled = Answer()
    recalled.recall(answer.events)
    assert figures(recalled, recalled.plain_rate) | {"first_ms": 0} == found | {"first_ms": 0}
    whole = answered([*said, *[(n, n + 1) for n in range(500, 580, 2)]])
    assert whole.loop is None and "repeats" not in whole.note


def test_an_overhead_below_one_is_noise_and_no_speed():
    answer = answered([(n, n + 100) for n in range(20)], plain=0.025)  # a step takes 0.02
    found = figures(answer, answer.plain_rate)
    assert found["is_noise"] and found["overhead"] == 1
    assert found["ratio"] == found["per_step"] == 2
    assert figures_of(answer).ratio == 2
    assert not figures(answer, 100.0)["is_noise"] and figures(answer, 100.0)["overhead"] == 2


def test_an_answer_that_a_stop_string_ended_says_so():
    answer = answered([(1,), (2,)], "stop", stop=["END", "###"])
    assert answer.note == "ended by the stop string “END” or “###”"
    assert answered([(1,), (2,)], "eos", stop=["END"]).note == ""
