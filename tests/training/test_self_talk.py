"""Self-talk: the backbone asks itself, and answers. The tiny one asks "bcd" and says "abcd"."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from support.training_models import CONTEXT, write_backbone

from medusa_chat.errors import UsageError
from medusa_chat.training import distill
from medusa_chat.training.answerers import BatchAnswerer
from medusa_chat.training.conversations import Conversation
from medusa_chat.training.distill import DistillRecipe
from medusa_chat.training.recipe import Recipe

END, USER, A = 1, 3, 5
B, D, E = A + 1, A + 3, A + 4
QUICK = DistillRecipe(max_new_tokens=8, temperatures=(0.0,), rows=2)


@pytest.fixture
def world(tmp_path, monkeypatch):
    """(answerer, tokenizer); questions are greedy here, so that they are known."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_backbone(tmp_path / "backbone")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    table, head = model.get_input_embeddings().weight, model.lm_head.weight
    with torch.no_grad():
        head[END] = 8 * table[D]  # "d" ends a turn
        head[E] = 0
        head[B] += 8 * table[USER]  # and "b" begins the user's
    monkeypatch.setattr(distill, "QUESTION_TEMPERATURE", 0.0)
    return BatchAnswerer(model, [END]), AutoTokenizer.from_pretrained(folder)


def conversation(*asked):
    return Conversation(tuple({"role": "user", "content": text} for text in asked), "here:1")


def talk(world, found, folder, questions=0, recipe=QUICK):
    """The events of an answer to each question, and of `questions` more."""
    return distill.answer_conversations(*world, found, recipe, CONTEXT, folder, questions)


def test_it_goes_on_with_questions_of_its_own(world, tmp_path):
    decode = world[1].decode
    found = [conversation("ab"), conversation("c", "a")]
    events = list(talk(world, found, tmp_path / "t", 2))
    assert [event.done for event in events] == list(range(1, 8))
    assert events[-1].total == 7  # (1 + 2) + (2 + 2)
    texts = [decode(event.example.ids) for event in events]
    asked = "<user>bcd</s><assistant>abcd</s>" * 2
    assert f"<user>ab</s><assistant>abcd</s>{asked}" in texts
    assert any(text.endswith(asked) and text.startswith("<user>c</s>") for text in texts[-2:])
    # the labels are the answers' tokens and never the questions'
    assert {decode(event.example.labels) for event in events} == {"abcd</s>"}


def test_without_it_nothing_more_is_asked(world, tmp_path):
    assert len(list(talk(world, [conversation("ab")], tmp_path / "t"))) == 1
    assert not list((tmp_path / "t").glob("questions-*"))


def test_a_question_without_an_end_ends_the_talk(world, tmp_path, monkeypatch):
    monkeypatch.setattr(distill, "QUESTION_TOKENS", 2)  # "bc" is all it can say
    assert len(list(talk(world, [conversation("ab")], tmp_path / "t", 3))) == 1


def test_an_interrupted_talk_goes_on_to_the_same_answers(world, tmp_path):
    found = [conversation("ab"), conversation("c")]
    recipe = replace(QUICK, temperatures=(0.7,))

    def said(folder, count):
        events = talk(world, found, tmp_path / folder, 2, recipe)
        return [event.example for event in islice(events, count)]

    whole = said("whole", 99)
    said("cut", 3)
    assert said("cut", 99) == whole


def test_a_conversation_that_the_template_refuses_ends_and_costs_no_other(world, tmp_path):
    refuses = "{% if 'c' in messages[-1]['content'] %}{{ raise_exception('no c') }}{% endif %}"
    world[1].chat_template = refuses + world[1].chat_template
    found = [replace(conversation("ab", "c", "a"), place="here:2"), conversation("ab")]
    *answered, refused = talk(world, found, tmp_path / "t")
    assert [event.place for event in answered] == ["here:2", "here:1"]
    assert refused.place == "here:2" and "no c" in refused.reason
    with pytest.raises(UsageError, match=r"here:1: the chat template refuses.*no c"):
        list(talk(world, [conversation("c")], tmp_path / "u"))


def test_it_is_refused_where_the_backbone_does_not_answer():
    with pytest.raises(UsageError, match="self-talk needs distill"):
        Recipe(self_talk=2)
