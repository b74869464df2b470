"""Prompts far beyond the context: refused before they are tokenised, which would take gigabytes."""

from dataclasses import replace

import pytest
from support.conversations import said, talk

from medusa_chat.checkpoints.control_tokens import ControlTokens
from medusa_chat.checkpoints.load import load
from medusa_chat.errors import ContextError
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime import prompt as prompts
from medusa_chat.runtime.prompt import encode, encode_latest

CONTEXT = 256


@pytest.fixture(scope="module")
def model():
    *_, (_, loaded) = load(LoadRequest("demo", precision="fp32", device="cpu", max_context=CONTEXT))
    return loaded


@pytest.fixture
def tokenised(model, monkeypatch):
    """How many characters were tokenised at each call, to find control tokens among them too."""
    sizes, hide = [], ControlTokens.hide

    def counted(self, typed, hidden):
        sizes.append(len(typed))
        return hide(self, typed, hidden)

    monkeypatch.setattr(ControlTokens, "hide", counted)

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
    many = text * (16_000_000 // len(text))
    for prompt in (many, [said("user", many)]):
        with pytest.raises(ContextError, match="and the context holds 256"):
            encode(counted, prompt)
    with pytest.raises(ContextError, match="and the context holds 256"):
        encode_latest(counted, [*talk(1)[:2], said("user", many)], 48)
    assert sum(sizes) <= longest(counted) * CONTEXT


def test_what_the_context_may_hold_by_its_characters_is_counted_in_parts(tokenised, monkeypatch):
    monkeypatch.setattr(prompts, "PART", 100)
    monkeypatch.setattr(prompts, "MANY", 0)
    counted, sizes = tokenised
    with pytest.raises(ContextError, match="more than 512 tokens and the context holds 256"):
        encode(counted, "z" * longest(counted) * CONTEXT)
    assert max(sizes) == 100 and sum(sizes) < 2 * CONTEXT + 100


def test_what_fits_is_never_refused(tokenised, monkeypatch):
    """The longest text that the context holds: its longest token, repeated."""
    monkeypatch.setattr(prompts, "PART", 100)
    monkeypatch.setattr(prompts, "MANY", 0)
    counted, _ = tokenised
    texts = (counted.tokenizer.decode(id) for id in counted.tokenizer.get_vocab().values())
    word = max((text for text in texts if text.startswith(" ")), key=len)
    text = word * (CONTEXT - 1)
    ids = encode(counted, text)[0]
    assert len(text) > 100 and len(ids) == CONTEXT - 1


def test_a_conversation_too_long_to_be_counted_goes_on_from_its_end(model, monkeypatch):
    monkeypatch.setattr(prompts, "PART", 100)
    monkeypatch.setattr(prompts, "MANY", 0)
    messages = talk(400)
    with pytest.raises(ContextError, match="start a new chat"):
        encode(model, messages)
    ids, text, left_out = encode_latest(model, messages, 48)[:3]
    assert messages[left_out]["role"] == "user" and CONTEXT // 2 < len(ids) <= CONTEXT - 48
    assert text == encode(model, messages[left_out:])[1]
    last = said("user", "a b " * 100_000)
    with pytest.raises(ContextError, match="shorten it"):
        encode_latest(model, [*messages, said("assistant", "yes"), last], 48)
