"""ShortVocabulary: heads that learn the tokens that they may draft, and no others."""

import pytest
import torch
from support.training_models import random_llama

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.events import Evaluated
from medusa_chat.training.examples import Example, collate
from medusa_chat.training.loss import (
    IGNORED,
    HeadInputs,
    ShortVocabulary,
    head_inputs,
    medusa_loss,
)
from medusa_chat.training.recipe import Recipe
from medusa_chat.training.trainer import new_heads, train_heads

VOCABULARY, HEADS, ROWS, WIDTH = 24, 3, 50, 32


def parts():
    model = random_llama(VOCABULARY)
    heads = MedusaHeads(HEADS, WIDTH)
    torch.nn.init.normal_(heads.weight, std=0.1)
    targets = torch.randint(0, VOCABULARY, (ROWS, HEADS))
    targets[3, 1] = IGNORED
    hidden, roots = torch.randn(ROWS, WIDTH), torch.randint(0, VOCABULARY, (ROWS,))
    return LogitHead(model.lm_head, model.config), heads, HeadInputs(hidden, roots, targets)


def loss(lm_head, heads, inputs):
    return medusa_loss(heads, lm_head, inputs)


def test_a_list_of_all_tokens_changes_nothing():
    lm_head, heads, inputs = parts()
    short = ShortVocabulary.of(range(VOCABULARY), lm_head)
    columns = on_columns(short, inputs)
    found, wanted = loss(short.lm_head, heads, columns), loss(lm_head, heads, inputs)
    torch.testing.assert_close(found.losses, wanted.losses)
    assert torch.equal(found.hits, wanted.hits) and torch.equal(found.labels, wanted.labels)


def test_the_loss_is_over_the_listed_tokens_alone():
    lm_head, heads, inputs = parts()
    listed = torch.tensor([1, 4, 5, 9, 20])
    short = ShortVocabulary.of(listed.tolist(), lm_head)
    columns = on_columns(short, inputs)
    found = loss(short.lm_head, heads, columns)
    logits = heads(inputs.hidden, inputs.roots, lm_head)[..., listed]
    for head in range(HEADS):
        is_listed = torch.isin(inputs.targets[:, head], listed)
        places = torch.searchsorted(listed, inputs.targets[is_listed, head])
        wanted = torch.nn.functional.cross_entropy(logits[head][is_listed], places)
        torch.testing.assert_close(found.losses[head], wanted)
        assert found.labels[head] == is_listed.sum()


def test_evaluations_are_over_the_listed_tokens_too():
    model = random_llama(VOCABULARY)
    short = ShortVocabulary.of([1, 4, 5, 9, 20], LogitHead(model.lm_head, model.config))
    example = Example((3, 4, 9, 9, 1, 5, 7, 20), (False, *[True] * 7))
    heads, recipe = new_heads(model.lm_head, HEADS), Recipe(max_steps=2, batch_tokens=16)

    def refuse(_):
        raise AssertionError("the logits of all tokens")

    events = list(train_heads(model, refuse, heads, [example], recipe, [example], short=short))
    evaluated = [event for event in events if isinstance(event, Evaluated)]
    assert len(evaluated) == 2 and all(0 <= row[0] <= 1 for row in evaluated[-1].top)
    wanted = loss(short.lm_head, heads, on_columns(short, head_inputs_of(model, example)))
    assert list(evaluated[-1].losses) == pytest.approx(wanted.losses.tolist())


def head_inputs_of(model, example):
    return head_inputs(model, collate([example]), HEADS)


def on_columns(short, inputs):
    return inputs._replace(targets=short.columns(inputs.targets))


def test_none_for_no_list_and_for_rows_that_cannot_be_taken():
    lm_head, _, _ = parts()
    assert ShortVocabulary.of([], lm_head) is None
    packed = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    lm_head.linear.weight = packed
    assert ShortVocabulary.of([1, 2], lm_head) is None
