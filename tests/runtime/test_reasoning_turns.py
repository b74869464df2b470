"""Reasoning between turns: what a template gets of it, how it is continued, what is kept."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from support.tokenizers import byte_tokenizer
from tokenizers import AddedToken

from medusa_chat.checkpoints.load import load
from medusa_chat.checkpoints.loaded_model import LoadedModel
from medusa_chat.decoding.budget import StepTimes
from medusa_chat.decoding.detokenizer import TokenTexts
from medusa_chat.decoding.reasoning import HARMONY_MARKERS
from medusa_chat.decoding.settings import GenerationSettings
from medusa_chat.messages import LoadRequest
from medusa_chat.runtime.prompt import encode
from medusa_chat.runtime.reply import reply
from medusa_chat.runtime.requests import Reply
from medusa_chat.runtime.stored_conversation import MessageTree

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPENING = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
FIELDS = (  # as Qwen3's and Seed's
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content is defined %}"
    "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPLITTING = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
CHANNELS = (  # as gpt-oss's first one, which wrote a past answer with "thinking" as analysis
    "{% for m in messages %}{% if m.role == 'user' %}<|start|>user<|message|>{{ m.content }}<|end|>"
    "{% elif 'thinking' in m %}<|start|>assistant<|channel|>analysis<|message|>{{ m.content }}"
    "<|end|>{% else %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
HI, MORE = {"role": "user", "content": "hi"}, {"role": "user", "content": "more"}


def answered(content, reasoning=None):
    known = {} if reasoning is None else {"reasoning": reasoning}
    return {"role": "assistant", "content": content, **known}


def model_of(template, special=("<|im_start|>", "<|im_end|>")):
    tokenizer = byte_tokenizer()
    tokens = [AddedToken(text, special=True) for text in special]
    tokenizer.add_special_tokens({"additional_special_tokens": tokens})
    tokenizer.chat_template = template
    info = SimpleNamespace(name="tiny", context=4096)
    return LoadedModel(None, tokenizer, TokenTexts(tokenizer), None, info, StepTimes([1.0]))


def prompt(template, *talk, **options):
    return encode(model_of(template, **options), list(talk))


@pytest.mark.parametrize("said", [answered("Yes", "Hm"), answered("<think>\nHm\n</think>\n\nYes")])
def test_a_template_gets_reasoning_in_its_fields_and_leaves_it_out_without_them(said):
    end = "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"
    start = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt(CHATML, HI, said, MORE).text == f"{start}Yes{end}"
    assert prompt(SPLITTING, HI, said, MORE).text == f"{start}Yes{end}"
    whole = f"{start}<think>\nHm\n</think>\n\nYes{end}"
    assert prompt(FIELDS, HI, said, MORE).text == whole


def test_a_past_answer_of_channels_is_its_final_one():
    text = prompt(CHANNELS, HI, answered("Yes", "Hm"), MORE, special=HARMONY_MARKERS).text
    assert text.count("<|channel|>") == 1 and "<|channel|>final<|message|>Yes<|end|>" in text


@pytest.mark.parametrize("template", [CHATML, OPENING, FIELDS, SPLITTING])
@pytest.mark.parametrize("cut", [answered("", "Hm, so"), answered("<think>Hm, so")])
def test_reasoning_that_never_ended_stays_open_in_no_later_prompt(template, cut):
    past = prompt(template, HI, cut, MORE).text.rpartition("user\nmore")[0]
    assert past.count("<think>") == past.count("</think>") and past.endswith("<|im_start|>")


def test_a_literal_tag_in_an_answer_is_handed_on_as_it_is():
    said = answered("Say `<think>` or </think> here", "Hm")
    assert (
        "assistant\nSay `<think>` or </think> here<|im_end|>" in prompt(CHATML, HI, said, MORE).text
    )
    assert "assistant\n here<|im_end|>" in prompt(SPLITTING, HI, said, MORE).text  # plain text here
    model = model_of(SPLITTING, ("<|im_start|>", "<|im_end|>", "<think>", "</think>"))
    assert said["content"] in encode(model, [HI, said, MORE]).text  # control tokens: hidden from it


@pytest.mark.parametrize(
    ("template", "said", "ends", "state"),
    [
        (CHATML, answered("", "Hm, "), "assistant\n<think>\nHm, ", "reasoning"),
        (OPENING, answered("", "Hm, "), "assistant\n<think>\nHm, ", "reasoning"),
        (CHATML, answered("Yes, ", "Hm"), "<think>\nHm\n</think>\n\nYes, ", "answer"),
        (CHATML, answered("<think> b"), "assistant\n<think>\nb", "reasoning"),
        (CHATML, answered("Yes <think> "), "assistant\nYes <think> ", "answer"),
        (CHATML, MORE, "<|im_start|>assistant\n", "begin"),
        (OPENING, MORE, "<|im_start|>assistant\n<think>\n", "opened"),
    ],
)
def test_an_answer_goes_on_where_it_was(template, said, ends, state):
    found = prompt(template, HI, said)
    assert found.text.endswith(ends) and found.state == state


def test_channels_go_on_where_they_were():
    def found(said):
        read = prompt(CHANNELS, HI, said, special=HARMONY_MARKERS)
        return read.text.removeprefix("<|start|>user<|message|>hi<|end|><|start|>assistant"), read

    text, read = found(answered("", "Hm, "))
    assert (text, read.state) == ("<|channel|>analysis<|message|>Hm, ", "reasoning")
    text, read = found(answered("Yes", "Hm"))
    assert text.endswith("Hm<|end|><|start|>assistant<|channel|>final<|message|>Yes")
    assert read.state == "answer" and found(MORE)[1].state == "header"


@pytest.fixture(scope="module")
def thinking():
    """The demo, whose generation prompt opens a block of reasoning."""
    *_, (_, made) = load(LoadRequest("demo", precision="fp32", device="cpu"))
    made.tokenizer.chat_template += "{% if add_generation_prompt %}<think>\n{% endif %}"
    return made


def test_what_the_prompt_opened_is_told_as_reasoning_and_continued_to_the_same_end(thinking):
    asked = [{"role": "user", "content": "Tell me a story about a fox"}]
    settings = GenerationSettings(max_new_tokens=20, seed=1)
    first, *steps, whole = reply(thinking, Reply(asked, settings))
    parts = [event.reasoning for event in (first, *steps)]
    assert whole.reasoning.startswith("".join(parts)) and len([part for part in parts if part]) > 3
    assert whole.text == "" and len(whole.reasoning) > 30
    *_, cut = reply(thinking, Reply(asked, replace(settings, max_new_tokens=9)))
    asked.append(answered(cut.text, cut.reasoning))
    first, *_, rest = reply(thinking, Reply(asked, replace(settings, max_new_tokens=11)))
    assert cut.reasoning + rest.reasoning == whole.reasoning
    assert first.reused_tokens >= len(first.prompt_token_ids) - 2


def test_a_raw_text_has_no_reasoning(thinking):
    settings = GenerationSettings(max_new_tokens=8, seed=1)
    *_, last = reply(thinking, Reply("<think>\nOnce upon", settings))
    assert last.reasoning == "" and last.text


def test_an_answer_that_an_older_version_stored_is_taken_apart():
    """Its tags stood in its content, and its pieces were cut of the whole."""
    tree = MessageTree().plus("user", "<think>hi").plus("assistant", "x", lengths=(2, 1))
    old = json.loads(json.dumps(tree.to_json()))
    for message in old["messages"]:
        del message["reasoning"]
    old["messages"][1] |= {
        "content": "<think>\nHm\n</think>\n\nYes <think>",
        "lengths": [1, 9, 2, 12, 3, 3, 1, 8],
    }
    asked, said = MessageTree.from_json(old).path
    assert (asked.content, asked.reasoning) == ("<think>hi", "")
    assert (said.content, said.reasoning) == ("Yes <think>", "Hm")
    assert said.lengths == (3, 3, 1, 8)
    again = MessageTree.from_json(json.loads(json.dumps(MessageTree.from_json(old).to_json())))
    assert again.path[1] == said and again.messages[1] == answered("Yes <think>", "Hm")
