"""The length of a message that is being written: the model's own count, and what is left."""

import asyncio
import json

import pytest
from support.scripted import ScriptedRunner

from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import CountRequest, LoadRequest
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.runner import InProcess
from medusa_chat.runtime.session import Session
from medusa_chat.ui.chat import quick_requests
from medusa_chat.ui.chat.quick_requests import count_line

HELLO = {"role": "user", "content": "Tell me a story about a fox"}


@pytest.fixture(scope="module")
def demo():
    session = Session(InProcess())
    list(
        session.lifecycle.run(LoadRequest("demo", device="cpu", precision="fp32", max_context=256))
    )
    yield session
    session.close()


def counted(session, *messages):
    (found,) = session.lifecycle.run(CountRequest(messages))
    return found


def test_the_first_message_and_what_is_left_are_the_context(demo):
    first, *_ = demo.lifecycle.run(Reply([HELLO], GenerationSettings(max_new_tokens=1)))
    found = counted(demo, HELLO)
    context = demo.lifecycle.state.model.context
    assert found.message == first.prompt_tokens and found.left == context - found.message


def test_a_later_message_is_counted_alone(demo):
    said = (HELLO, {"role": "assistant", "content": "There was a fox."})
    short, long = (
        counted(demo, *said, {"role": "user", "content": text}) for text in ("And", "And " * 50)
    )
    assert short.message < 12 and long.message > 50
    assert short.left - long.left == long.message - short.message


def test_a_conversation_that_is_too_long_has_less_than_nothing_left(demo):
    assert counted(demo, {"role": "user", "content": "fox and goat " * 200}).left < 0


def test_a_text_that_no_context_holds_is_told_without_figures(demo):
    huge = [{"role": "user", "content": "fox " * 250_000}]
    assert json.loads(asyncio.run(count_line(demo, huge, 3))) == {"asked": 3}


def test_a_busy_model_is_asked_again_later(demo, monkeypatch):
    monkeypatch.setattr(quick_requests, "COUNT_SECONDS", 0.0)
    assert json.loads(asyncio.run(count_line(demo, [HELLO], 4))) == {"asked": 4, "wait": True}


def test_two_tabs_that_type_have_one_question_in_the_queue(monkeypatch):
    monkeypatch.setattr(quick_requests, "COUNT_SECONDS", 0.2)
    session = Session(ScriptedRunner(delay=0.05, steps=200))
    assert session.submit(LoadRequest()).done.wait(60)
    answer = session.submit(Reply([HELLO], GenerationSettings(max_new_tokens=500)))
    most = []

    async def both():
        texts = [{"role": "user", "content": text} for text in ("one", "two")]
        asked = [asyncio.create_task(count_line(session, [text], 5)) for text in texts]
        await asyncio.sleep(0.1)
        most.append(len(session._queue.waiting(CountRequest)))
        return await asyncio.gather(*asked)

    lines = asyncio.run(both())
    assert most == [1] and [json.loads(line) for line in lines] == [{"asked": 5, "wait": True}] * 2
    session.cancel(answer)
    session.close()


def test_a_long_conversation_is_not_counted_while_one_types(demo, monkeypatch):
    monkeypatch.setattr(Session, "take_up", None)
    long = [HELLO, {"role": "assistant", "content": "fox " * 62_500}, HELLO]
    assert json.loads(asyncio.run(count_line(demo, long, 6))) == {"asked": 6}
