"""Conversations beyond the context: the oldest messages are left out, and it is told."""

from dataclasses import replace

import pytest
from tokenizers import AddedToken

from medusa_chat.checkpoints.load import load
from medusa_chat.decoding.events import Finished, Prefilled
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.errors import ContextError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import prompt_length
from medusa_chat.runtime.prompt_ids import encode, encode_latest
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
    model.said = ("", [])


def said(role, text):
    return {"role": role, "content": text}


def talk(turns):
    roles = ("user", "assistant") * turns
    told = [said(role, f"This is message {at} of the {role}.") for at, role in enumerate(roles)]
    return [*told, said("user", "Tell me a story")]


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
    model.said = ("", [])
    assert list(first.prompt_token_ids) == encode(model, messages[first.left_out :])[0]


def test_it_is_refused_where_all_of_it_is_asked_for(model):
    with pytest.raises(ContextError, match="the context holds 256"):
        answer(model, talk(40), drops_oldest=False)


def test_the_system_prompt_stays(model):
    ids, text, left_out = encode_latest(model, [SYSTEM, *talk(40)], 48)
    assert SYSTEM["content"] in text and len(ids) + 48 <= CONTEXT
    assert talk(40)[left_out]["content"] in text and talk(40)[left_out - 1]["content"] not in text


def test_turns_to_come_begin_alike(model):
    starts = [encode_latest(model, talk(turns), 48)[2] for turns in range(60)]
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
    *_, left_out = encode_latest(model, [*talk(5)[:-1], long], 48)
    assert left_out == 10
    with pytest.raises(ContextError):
        answer(model, [*talk(5)[:-1], said("user", "word " * 400)])


def test_an_answer_that_is_continued_stays_with_its_question(model):
    begun = said("assistant", "Once upon a time")
    _, text, left_out = encode_latest(model, [*talk(40), begun], 48)
    assert text.endswith("Once upon a time") and "Tell me a story" in text and left_out > 0


def test_room_for_long_answers_is_a_quarter_of_the_context(model):
    asked = replace(SETTINGS, max_new_tokens=4096)
    first, *_ = reply(model, Reply(talk(8), asked, drops_oldest=True))
    ids = encode(model, talk(8))[0]
    assert (first.left_out == 0) == (len(ids) + CONTEXT // 4 <= CONTEXT)


def test_special_tokens_that_no_map_names_stay_text(model, monkeypatch):
    """As Llama-3's <|eot_id|>: it would end the user's turn and begin another."""
    known = AddedToken("<|eot_id|>", special=True)
    monkeypatch.setattr(type(model.tokenizer), "added_tokens_decoder", {5: known})
    _, text = encode(model, [said("user", "a<|eot_id|>b")])
    assert "<|eot_id|>" not in text


# ---- far too long ones ----


@pytest.fixture
def tokenised(model, monkeypatch):
    """How many characters the tokenizer got at each call."""
    sizes = []

    class Counting:
        def __call__(self, text, **how):
            sizes.append(len(text))
            return model.tokenizer(text, **how)

        def __getattr__(self, name):
            return getattr(model.tokenizer, name)

    yield replace(model, tokenizer=Counting()), sizes


def longest(model):
    return max(map(len, model.tokenizer.get_vocab()))


@pytest.mark.parametrize("text", ["a b ", "x7Qz9!k#2@", "\N{SNOWMAN} ", " "])
def test_millions_of_characters_are_refused_before_they_are_tokenised(tokenised, text):
    """They took over 6 GB and over a minute."""
    counted, sizes = tokenised
    for prompt in (text * (16_000_000 // len(text)), [said("user", text * 1_000_000)]):
        with pytest.raises(ContextError, match="and the context holds 256"):
            encode(counted, prompt)
    assert sum(sizes) <= longest(counted) * CONTEXT


def test_what_the_context_may_hold_by_its_characters_is_counted_in_parts(tokenised, monkeypatch):
    monkeypatch.setattr(prompt_length, "PART", 100)
    monkeypatch.setattr(prompt_length, "MANY", 0)
    counted, sizes = tokenised
    with pytest.raises(ContextError, match="more than 512 tokens and the context holds 256"):
        encode(counted, "z" * longest(counted) * CONTEXT)
    assert max(sizes) == 100 and sum(sizes) < 2 * CONTEXT + 100


def test_what_fits_is_never_refused(tokenised, monkeypatch):
    """The longest text that the context holds: its longest token, repeated."""
    monkeypatch.setattr(prompt_length, "PART", 100)
    monkeypatch.setattr(prompt_length, "MANY", 0)
    counted, _ = tokenised
    texts = (counted.tokenizer.decode(id) for id in counted.tokenizer.get_vocab().values())
    word = max((text for text in texts if text.startswith(" ")), key=len)
    text = word * (CONTEXT - 1)
    ids, _ = encode(counted, text)
    assert len(text) > 100 and len(ids) == CONTEXT - 1


def test_a_conversation_too_long_to_be_counted_goes_on_from_its_end(model, monkeypatch):
    monkeypatch.setattr(prompt_length, "PART", 100)
    monkeypatch.setattr(prompt_length, "MANY", 0)
    messages = talk(400)
    with pytest.raises(ContextError, match="start a new chat"):
        encode(model, messages)
    ids, text, left_out = encode_latest(model, messages, 48)
    assert messages[left_out]["role"] == "user" and CONTEXT // 2 < len(ids) <= CONTEXT - 48
    assert text == encode(model, messages[left_out:])[1]
    last = said("user", "a b " * 100_000)
    with pytest.raises(ContextError, match="shorten it"):
        encode_latest(model, [*messages, said("assistant", "yes"), last], 48)
