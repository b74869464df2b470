"""Conversations beyond the context: the oldest messages are left out, and it is told."""

from dataclasses import replace

import pytest
from support.conversations import said, talk

from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.events import Finished, Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ContextError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt import encode, encode_latest
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply

CONTEXT = 256
SETTINGS = GenerationSettings(temperature=0.0, max_new_tokens=48, seed=1, drafter="none")
SYSTEM = {"role": "system", "content": "You tell stories."}


@pytest.fixture(scope="module")
def model():
    *_, (_, loaded) = load(LoadRequest("demo", precision="fp32", device="cpu", max_context=CONTEXT))
    return loaded


@pytest.fixture(autouse=True)
def forgetful(model):
    model.engine.forget()
    model.said = ()


def answer(model, messages, drops_oldest=True, settings=SETTINGS):
    return list(reply(model, Reply(messages, settings, drops_oldest)))


def test_a_conversation_that_fits_is_read_whole(model):
    first, *_ = answer(model, talk(2))
    assert first.left_out == 0
    assert list(first.prompt_token_ids) == encode(model, talk(2))[0]


def test_one_that_does_not_fit_is_answered_from_its_end(model):
    messages = talk(40)
    first, *_, last = answer(model, messages)
    assert isinstance(first, Prefilled) and isinstance(last, Finished)
    assert first.left_out > 0 and messages[first.left_out]["role"] == "user"
    assert first.prompt_tokens + SETTINGS.max_new_tokens <= CONTEXT
    model.said = ()
    assert list(first.prompt_token_ids) == encode(model, messages[first.left_out :])[0]


def test_it_is_refused_where_all_of_it_is_asked_for(model):
    with pytest.raises(ContextError, match="the context holds 256"):
        answer(model, talk(40), drops_oldest=False)


def test_the_system_prompt_stays(model):
    ids, text, left_out, *_ = encode_latest(model, [SYSTEM, *talk(40)], 48)
    assert SYSTEM["content"] in text and len(ids) + 48 <= CONTEXT
    assert talk(40)[left_out]["content"] in text and talk(40)[left_out - 1]["content"] not in text


def test_turns_to_come_begin_alike(model):
    starts = [encode_latest(model, talk(turns), 48).left_out for turns in range(60)]
    assert starts[0] == 0 and starts == sorted(starts)
    parts = len(encode(model, talk(60))[0]) // (CONTEXT // 4)
    assert 1 < len(set(starts)) <= parts + 2 < 40, "it would be read anew for every answer"


def test_the_cache_is_reused_once_messages_are_left_out(model):
    messages, reused = talk(14), []
    short = replace(SETTINGS, max_new_tokens=8)
    for _ in range(7):
        first, *_, last = answer(model, messages, settings=short)
        reused.append(first.reused_tokens / first.prompt_tokens)
        messages = [*messages, said("assistant", last.text), said("user", "And then?")]
    assert first.left_out > 0
    assert sum(share > 0.5 for share in reused[1:]) >= 4, reused


def test_one_long_message_is_tried_alone(model):
    long = said("user", "word " * 180)
    left_out = encode_latest(model, [*talk(5)[:-1], long], 48).left_out
    assert left_out == 10
    with pytest.raises(ContextError):
        answer(model, [*talk(5)[:-1], said("user", "word " * 400)])


def test_an_answer_that_is_continued_stays_with_its_question(model):
    begun = said("assistant", "Once upon a time")
    _, text, left_out, *_ = encode_latest(model, [*talk(40), begun], 48)
    assert text.endswith("Once upon a time") and "Tell me a story" in text and left_out > 0


def test_room_for_long_answers_is_a_quarter_of_the_context(model):
    asked = replace(SETTINGS, max_new_tokens=4096)
    first, *_ = reply(model, Reply(talk(8), asked, drops_oldest=True))
    ids = encode(model, talk(8))[0]
    assert (first.left_out == 0) == (len(ids) + CONTEXT // 4 <= CONTEXT)
