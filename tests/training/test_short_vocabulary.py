"""ShortVocabulary: heads that learn the tokens that they may draft, and no others."""

import torch
from support.training_models import random_llama

from medusa_chat.decoding.backbone import LogitHead
from medusa_chat.decoding.heads import MedusaHeads
from medusa_chat.training.loss import IGNORED, HeadInputs, ShortVocabulary, medusa_loss

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
    columns = inputs._replace(targets=short.columns(inputs.targets))
    found, wanted = loss(short.lm_head, heads, columns), loss(lm_head, heads, inputs)
    torch.testing.assert_close(found.losses, wanted.losses)
    assert torch.equal(found.hits, wanted.hits) and torch.equal(found.labels, wanted.labels)


def test_the_loss_is_over_the_listed_tokens_alone():
    lm_head, heads, inputs = parts()
    listed = torch.tensor([1, 4, 5, 9, 20])
    short = ShortVocabulary.of(listed.tolist(), lm_head)
    columns = inputs._replace(targets=short.columns(inputs.targets))
    found = loss(short.lm_head, heads, columns)
    logits = heads(inputs.hidden, inputs.roots, lm_head)[..., listed]
    for head in range(HEADS):
        is_listed = torch.isin(inputs.targets[:, head], listed)
        places = torch.searchsorted(listed, inputs.targets[is_listed, head])
        wanted = torch.nn.functional.cross_entropy(logits[head][is_listed], places)
        torch.testing.assert_close(found.losses[head], wanted)
        assert found.labels[head] == is_listed.sum()


def test_none_for_no_list_and_for_rows_that_cannot_be_taken():
    lm_head, _, _ = parts()
    assert ShortVocabulary.of([], lm_head) is None
    packed = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    lm_head.linear.weight = packed
    assert ShortVocabulary.of([1, 2], lm_head) is None
